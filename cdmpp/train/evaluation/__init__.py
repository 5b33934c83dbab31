"""Metrics, baselines and the evaluation of measured tables."""
