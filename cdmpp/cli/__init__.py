"""The ``cdmpp`` command and the demonstration: thin commands over the Python interface.

A command reads options, calls one function and prints its result. Logic belongs in the room of that function.
"""
