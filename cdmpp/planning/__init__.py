"""Decisions over predicted latencies: pipelines, RL pools, precision, and smaller plans.

One folder for each planner; :mod:`cdmpp.planning.kinds` lists them for the doors.
"""
