"""Domain scores, peers of an unseen device, and calibrated intervals (numpy only)."""
