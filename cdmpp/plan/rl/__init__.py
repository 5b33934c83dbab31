"""Planner of RL post-training steps: pool sizes, dispatch, streaming and migration (StreamRL, RLHFuse).

Read it as a paper. Problem: ``schema`` with its parts ``lengths``, ``pools`` and ``weights``, then ``sizes`` and
``problem``. Cost: ``generation``, ``dispatch``, ``migration``, ``training`` and ``evaluate``, calibrated by
``measured``. Search: ``size_search`` and ``solver``. Then ``check`` and ``report``. ``from_config`` writes requests.
"""
