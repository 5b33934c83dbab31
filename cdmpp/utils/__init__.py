"""Helpers that know nothing of the domain: units, caches, compiled functions, atomic writing.

What knows a program, a device or a file format of the project belongs in the room of that thing.
"""
