"""``POST /predict`` and ``POST /programs``."""
