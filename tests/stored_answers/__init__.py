"""Answers of an earlier commit, which a change of structure must reproduce."""
