"""What is best: plans over predicted latencies, sweeps, their formats, and runs on several machines.

Each planner has a folder; :mod:`cdmpp.plan.registry` lists them. What times one given execution belongs in
:mod:`cdmpp.simulate`.
"""
