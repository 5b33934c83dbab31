"""RL post-training steps: sizes of the pools, dispatch, streaming, migration (StreamRL, RLHFuse)."""

from cdmpp.planning.rl.costs import Pool, TrainingCost, token_table
from cdmpp.planning.rl.dispatch import Dispatcher, Split
from cdmpp.planning.rl.evaluate import Outcome, evaluate
from cdmpp.planning.rl.generation import Engine, Generated, Queues, generate
from cdmpp.planning.rl.lengths import Drawn, Lengths, Ranker, draw_steps
from cdmpp.planning.rl.migration import Link, Migration
from cdmpp.planning.rl.search import Plan, Problem, search
from cdmpp.planning.rl.sizes import Sizes, Terms

__all__ = [
    "Dispatcher",
    "Drawn",
    "Engine",
    "Generated",
    "Lengths",
    "Link",
    "Migration",
    "Outcome",
    "Plan",
    "Pool",
    "Problem",
    "Queues",
    "Ranker",
    "Sizes",
    "Split",
    "Terms",
    "TrainingCost",
    "draw_steps",
    "evaluate",
    "generate",
    "search",
    "token_table",
]
