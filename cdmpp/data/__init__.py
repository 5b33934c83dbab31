"""Measurement records, importers of public tables, and splits (pyarrow)."""
