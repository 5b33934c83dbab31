"""The latency network and its losses (torch)."""
