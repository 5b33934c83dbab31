"""Inference steps, and the calls of the attention that stand for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from cdmpp.errors import FieldError
from cdmpp.programs.attention import equal_sequences
from cdmpp.programs.elements import MAX_EXTENT


@dataclass(frozen=True)
class Prefill:
    """A step over whole prompts."""

    lengths: tuple[int, ...]  # new tokens of each sequence of the batch
    past_len: int = 0  # cached tokens in front of each sequence's new ones: chunks of a prompt before this one

    def __init__(self, lengths: Sequence[int], past_len: int = 0) -> None:
        object.__setattr__(self, "lengths", tuple(lengths))
        object.__setattr__(self, "past_len", past_len)
        if not self.lengths or not all(type(n) is int and 1 <= n <= MAX_EXTENT for n in self.lengths):
            raise FieldError("lengths: a prefill step has one or more sequences of at least one token", path="lengths")

    @property
    def batch(self) -> int:
        """Sequences."""
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(self.lengths)


@dataclass(frozen=True)
class Decode:
    """A step that adds one token to each sequence."""

    batch: int  # sequences
    past_len: int = 0  # cached tokens of each sequence, before this step
    # cached tokens of all sequences, in place of ``past_len``, where their lengths differ
    past_total: int | None = None
    # Further tokens of each sequence, which a layer for the prediction of several tokens has drafted and the step
    # checks.
    drafted: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return self.batch * (1 + self.drafted)

    @property
    def cached(self) -> int:
        """Cached tokens of a sequence, on average."""
        return self.past_len if self.past_total is None else round(self.past_total / self.batch)


Step = Prefill | Decode


def attention_batches(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Batch and length of the attention calls that stand for one call over sequences of several lengths.

    Equal lengths are one call. Sequences of different lengths run in one call too, priced by :func:`equal_sequences`.
    """
    return [equal_sequences(sum(lengths), sum(n * n for n in lengths))]


def attention_calls(step: Step, window: int | None) -> list[tuple[str, dict[str, int]]]:
    """Calls of the attention: "prefill" or "decode", and its sizes."""
    if isinstance(step, Decode):
        cached = step.cached if window is None else min(step.cached, window - 1)
        return [("decode", {"batch": step.batch, "past_len": cached})]
    if step.past_len:
        past = step.past_len if window is None else min(step.past_len, window - 1)
        return [
            ("prefill", {"batch": n, "q_len": length, "past_len": past})
            for n, length in attention_batches(step.lengths)
        ]
    if window is None or max(step.lengths) <= window:
        return [("prefill", {"batch": n, "q_len": length}) for n, length in attention_batches(step.lengths)]
    # Blocks of queries that have as many keys as a causal window: the first block has its own, further blocks have
    # cached ones in front.
    blocks = Counter[tuple[int, int]]()
    for length in step.lengths:
        blocks[min(length, window), 0] += 1
        whole, rest = divmod(max(0, length - window), window)
        blocks[window, window // 2] += whole
        blocks[rest, window - rest // 2] += rest > 0
    return [("prefill", {"batch": n, "q_len": length, "past_len": past}) for (length, past), n in blocks.items() if n]
