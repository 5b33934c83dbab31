"""Predictions for users: programs, modules, tables and curves.

It turns requests into queries and network outputs into answers. Whole language models belong in :mod:`cdmpp.llm`, what
adds up time on a timeline in :mod:`cdmpp.simulate`, what chooses between alternatives in :mod:`cdmpp.plan`.
"""
