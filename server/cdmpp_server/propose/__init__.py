"""Proposals: adapted models that a job has made; an administrator may load one."""
