"""Proposals: adapted models that a job has made; an administrator takes one or leaves it."""
