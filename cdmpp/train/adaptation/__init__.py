"""Adaptation to one device: selection of programs to measure, and fitting of an adapter."""
