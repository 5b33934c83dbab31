"""Predictions for users: programs, modules, language models, tables and curves, here or by a service.

It turns requests into queries and network outputs into answers. What adds up time on a timeline belongs in
:mod:`cdmpp.simulate`, what chooses between alternatives in :mod:`cdmpp.plan`.
"""
