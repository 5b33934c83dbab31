"""``POST /predict``: what travels, and how it is answered."""
