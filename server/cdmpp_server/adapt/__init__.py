"""``POST /adapt``: adaptation of the model to measurements of one device."""
