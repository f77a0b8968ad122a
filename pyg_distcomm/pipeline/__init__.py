"""Trains deep models in stages over ranks, through which chunks of nodes stream."""
