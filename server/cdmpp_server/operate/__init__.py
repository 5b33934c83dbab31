"""Metrics, logs, API keys and rate limits, applied to every request."""
