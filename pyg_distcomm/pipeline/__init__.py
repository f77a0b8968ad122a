"""Layers over ranks, chunks of nodes through them, and history between chunks."""
