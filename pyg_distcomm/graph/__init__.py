"""Spreads a graph over ranks: its edges, and what is derived from them."""
