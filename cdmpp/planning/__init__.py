"""Decisions over predicted latencies: pipelines, RL pools, precision, and smaller plans.

One folder for each planner; :mod:`cdmpp.planning.registry` lists them for the doors.
"""
