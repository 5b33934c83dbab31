"""Device specifications: one table, lookup by name, files of one's own, and the encoding for the model."""
