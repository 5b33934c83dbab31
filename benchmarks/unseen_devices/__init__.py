"""Devices that training never saw: groups, networks, baselines, adaptation."""
