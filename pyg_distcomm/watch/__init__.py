"""Watches a run: figures of each epoch, and a page that draws them."""
