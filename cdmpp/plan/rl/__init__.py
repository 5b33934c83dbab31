"""Planner of RL post-training steps: pool sizes, dispatch, streaming and migration (StreamRL, RLHFuse).

``schema`` has the request and the plan, ``solver`` the search. The simulation is in ``generation``
(rollouts), ``training`` (streamed batches) and ``migration``.
"""
