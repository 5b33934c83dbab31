"""Defaults of the options of language models: the same in Python, at the command line, over HTTP and in TOML."""

from __future__ import annotations

from typing import Final

#: Engine profiles: of serving, and of training.
ENGINE: Final = "vllm"
TRAINING_ENGINE: Final = "megatron"
#: Element type of activations.
DTYPE: Final = "bfloat16"
#: Each degree of parallelism but ``dp``.
DEGREE: Final = 1
#: Sequences of a batch, and tokens of a prompt and of an answer. A request that is served has a longer answer.
BATCH: Final = 1
INPUT: Final = 1024
OUTPUT: Final = 128
SERVED_OUTPUT: Final = 1024
CUDA_GRAPH: Final = True
#: Drafted tokens, and the share of them that is right; DeepSeek V3 reports 85 to 90 % for the first one.
MTP: Final = 0
ACCEPTANCE: Final = 0.8
#: Seed of arrivals and lengths, and the share of a prompt that is in the cache.
SEED: Final = 0
PREFIX_HIT: Final = 0.0
#: Share of the requests that keep goals of latency.
SHARE: Final = 0.9
#: Of a training step.
MICRO_BATCH: Final = 1
SHARDING: Final = "none"
RECOMPUTE: Final = "none"
