"""Whole language models against public measurements of serving batches."""
