"""Lengths, rankers and requests that tests of the RL planner share."""

from typing import Any

import numpy as np

from cdmpp.plan.rl.generation import SampleQueues
from cdmpp.plan.rl.lengths import LengthDistribution, Misses, RankerForm

LENGTHS = LengthDistribution.of_quantiles({0.5: 300, 0.9: 1000, 1.0: 4000}, 64)
#: A request without pools.
BASE: dict[str, Any] = {
    "lengths": {"quantiles": {"0.5": 300, "0.9": 1000, "0.99": 3000}, "max_tokens": 4000},
    "samples_per_step": 64,
    "decode": {"a_s": 0.01, "b_s": 0.0002},
    "kv": {"max_batch": 16},
    "draws": 4,
    "budget_s": 600,
}
#: Two pools that generate and train.
REQUEST: dict[str, Any] = {
    **BASE,
    "inference": 0.2,
    "pools": [
        {"name": "here", "units": 6, "price_per_hour": 3, "site": "a"},
        {"name": "there", "units": 5, "price_per_hour": 1, "site": "b"},
    ],
    "training": {"seconds_per_token": 0.002, "fixed_s": 1, "efficiency": 0.9, "batch_overhead_s": 0.3},
    "weights": {"same_site_s": 0.5, "cross_site_s": 4},
}


def ranker(recall: float = 0.87, share: float = 0.2, misses: Misses = "any") -> RankerForm:
    """A ranker that misses any of the longest samples."""
    return RankerForm(recall=recall, share=share, misses=misses)


def dealt(samples: int, instances: int) -> SampleQueues:
    """One queue per instance; samples are dealt to them in turn."""
    return SampleQueues.of([np.arange(first, samples, instances, dtype=np.int64) for first in range(instances)])
