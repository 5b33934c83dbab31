"""How long it takes: replay of graphs, the pipeline emulator, profiler traces.

It times one given execution. What searches for the best one belongs in :mod:`cdmpp.plan`.
"""
