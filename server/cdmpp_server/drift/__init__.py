"""Drift: a job adapts the model to a device that has drifted, and stores the result as a proposal."""
