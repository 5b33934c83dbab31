"""The training loop, its configuration and the artifacts it writes."""
