"""Predictions as HTML tables for notebooks and as Arrow tables."""
