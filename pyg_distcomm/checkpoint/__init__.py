"""Saves training and loads it again, whole under any kill, on any number of ranks."""
