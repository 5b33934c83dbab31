"""``POST /curve``: a template over axes on devices."""
