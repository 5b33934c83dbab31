"""Training steps of language models against published measurements."""
