"""Feedback from measured latencies: storage, running error and drift of the predictions."""
