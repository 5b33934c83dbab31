"""Best latency found against measured trials, for several cost models in one and the same search."""
