"""Brute-forced GPU schedules, leaving one GPU out: order within a kernel and error, with and without measurements."""
