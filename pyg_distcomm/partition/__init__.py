"""Who owns which node: cutters, their figures, and partitioned graphs on disk."""
