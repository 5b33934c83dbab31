"""cdmpp inside other people's tools: :mod:`cdmpp.integrations.metaschedule` for TVM's search."""
