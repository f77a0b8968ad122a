"""Saves and loads checkpoints: whole if a process is killed, and on any number of ranks."""
