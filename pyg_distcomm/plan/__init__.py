"""What an epoch will cost on each grid, before anything is sent, and which grid to take."""
