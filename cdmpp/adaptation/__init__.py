"""Measurements of one device put to use: which programs to measure, and a model adapted by them."""
