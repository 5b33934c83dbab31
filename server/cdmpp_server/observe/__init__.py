"""Feedback: measured latencies come back, are kept, and say how far the answers can be trusted."""
