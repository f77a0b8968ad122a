"""Spreads tensors over ranks by rows, and dispatches torch functions on them."""
