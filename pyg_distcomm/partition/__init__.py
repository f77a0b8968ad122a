"""Partitions graphs: assigns nodes to parts, counts what parts exchange, and stores parts."""
