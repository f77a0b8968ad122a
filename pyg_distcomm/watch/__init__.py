"""Records metrics of each epoch of a run, and draws them on an HTML page."""
