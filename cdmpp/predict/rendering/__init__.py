"""HTML tables for notebooks and Arrow tables."""
