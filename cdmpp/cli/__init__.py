"""The ``cdmpp`` command: thin commands over the Python interface."""
