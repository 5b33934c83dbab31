"""Searches that take longer than a request waits: kept in the database, done by whichever worker is free."""
