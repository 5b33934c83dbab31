"""Whole serving systems against published measurements, per engine profile."""
