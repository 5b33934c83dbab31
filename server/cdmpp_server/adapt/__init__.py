"""``POST /adapt``: measurements in, an adapted model out."""
