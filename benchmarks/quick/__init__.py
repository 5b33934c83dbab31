"""Experiments of minutes: a variant of the model is trained on a fixed sample and compared with a stored reference."""
