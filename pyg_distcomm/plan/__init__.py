"""Prices training on each grid before anything is sent, and picks one."""
