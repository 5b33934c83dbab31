"""Predictions of whole torch modules, in inference and training."""
