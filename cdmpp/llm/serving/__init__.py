"""Serving: simulated engines, loads and goals, and profiles fitted to measured servers."""
