"""Training, evaluation and adaptation: what fits weights to measurements and judges them.

What predicts with fitted weights belongs in :mod:`cdmpp.model`.
"""
