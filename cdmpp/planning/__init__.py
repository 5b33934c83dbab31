"""Plans based on predicted latencies: pipelines, RL pools, precision, and smaller ones.

Each planner has a folder; :mod:`cdmpp.planning.registry` lists them.
"""
