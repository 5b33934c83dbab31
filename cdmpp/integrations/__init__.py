"""Integrations with other tools: :mod:`cdmpp.integrations.metaschedule` for TVM's search."""
