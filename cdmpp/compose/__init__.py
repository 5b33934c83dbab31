"""Parts that replay, the emulator and the planners share.

``request`` has the base classes of requests and answers, ``pricing`` resolves costs with a predictor, ``budget``
limits a search, ``render`` and ``plot`` show answers, ``solve`` ties them together.
"""
