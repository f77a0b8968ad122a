"""Plans exchanges of rows by ids, which tensors, loaders and embeddings share."""
