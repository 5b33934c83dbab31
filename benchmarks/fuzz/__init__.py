"""Hostile bodies for every endpoint of the real service, counted: no 500, no hang, no growth."""
