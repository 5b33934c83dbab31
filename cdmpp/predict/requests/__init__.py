"""Requests and answers that replay, the emulator and the planners share.

``request`` has the base classes, ``pricing`` resolves costs with a predictor, ``budget`` limits a search,
``render`` and ``plot`` show answers.
"""
