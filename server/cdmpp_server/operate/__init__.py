"""Operation: metrics, logs, keys and rate limits; what surrounds every request."""
