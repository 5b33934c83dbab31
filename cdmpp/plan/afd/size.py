"""Instance counts of attention-FFN disaggregation: an exact enumeration (Step-3).

A decoding step takes a micro-batch of B tokens through L layers. In each layer x attention instances hold
B/x sequences each, y feed-forward instances compute B/y tokens each, and activations travel there and back.
Three micro-batches are in flight, one in each stage, so a token takes

    TPOT = 3 L max(attention(B/x), ffn(B/y), communication)

and the service gives B tokens in L max(...) seconds. The enumeration covers every (x, y, B) and skips those that
a lower bound excludes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from cdmpp.errors import InfeasibleError
from cdmpp.plan.afd.schema import ColocatedPlan
from cdmpp.plan.base.batch_curve import interpolate
from cdmpp.predict.requests.budget import SearchControl

#: Micro-batches in flight: one in attention, one on the links, one in the feed-forward layer.
IN_FLIGHT = 3
#: Largest number of choices, or of pairs of tokens, in one array.
_CELLS = 2**17
#: Most pairs of counts that are all tried, without lower bounds.
_FEW_COUNTS = 128
#: Least numbers of tokens along one side of a block of pairs, and most blocks along one side.
_EDGE = 64
_MOST_BLOCKS = 1024
#: Values that differ by less than this share are equal.
_EQUAL = 1e-12
#: Lower bounds are exact up to this share.
_SLACK = 1e-9


@dataclass(frozen=True)
class AfdSide:
    """The attention or the feed-forward instances."""

    # (points,): seconds of one layer by tokens on one instance.
    sizes: np.ndarray
    seconds: np.ndarray
    max_instances: int  # instances that may be used
    price: float  # of one instance, per hour or in any unit; 1 counts devices
    max_tokens: int  # tokens that one instance may hold (KV memory of attention)

    def layer_s(self, tokens: np.ndarray) -> np.ndarray:
        """Seconds of one layer; infinite beyond ``max_tokens``."""
        return np.asarray(np.where(tokens <= self.max_tokens, interpolate(self.sizes, self.seconds, tokens), np.inf))


@dataclass(frozen=True)
class AfdLink:
    """One instance's link: ``alpha_s`` a message, ``bytes_per_token`` each way at ``bandwidth``."""

    bytes_per_token: float
    bandwidth_bytes_per_s: float
    alpha_s: float = 0.0

    def layer_s(self, tokens: np.ndarray) -> np.ndarray:
        """Seconds of one layer, there and back, through the link that carries most tokens."""
        return np.asarray(2 * (self.alpha_s + tokens * self.bytes_per_token / self.bandwidth_bytes_per_s))


@dataclass(frozen=True)
class LinkCurve:
    """Seconds of one layer, there and back, by tokens on the instance with most tokens; as in :class:`AfdSide`."""

    sizes: np.ndarray
    seconds: np.ndarray

    def layer_s(self, tokens: np.ndarray) -> np.ndarray:
        """Seconds of one layer, there and back."""
        return np.asarray(interpolate(self.sizes, self.seconds, tokens))


AnyLink = AfdLink | LinkCurve


@dataclass(frozen=True)
class Sizing:
    """A choice, its stages (seconds of a micro-batch in all layers), its cost in price-seconds a token.

    ``complete`` is false if the search was stopped before it had tried all choices.
    """

    attention: int
    ffn: int
    micro_batch: int
    attention_s: float
    ffn_s: float
    communication_s: float
    price_s_per_token: float
    complete: bool = True

    @property
    def stage_s(self) -> float:
        """The slowest stage."""
        return max(self.attention_s, self.ffn_s, self.communication_s)

    @property
    def tpot_s(self) -> float:
        """Seconds between two tokens of a sequence."""
        return IN_FLIGHT * self.stage_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the whole service."""
        return self.micro_batch / self.stage_s


def size(
    attention: AfdSide,
    ffn: AfdSide,
    link: AnyLink,
    *,
    layers: int,
    tpot_s: float,
    tokens_per_s: float = 0.0,
    equal: bool = False,
    control: SearchControl | None = None,
) -> Sizing:
    """The cheapest choice per token that keeps the goal; equal ones: fewer instances, smaller batch.

    ``tpot_s``: most seconds between two tokens. ``tokens_per_s``: fewest tokens a second of the whole service.
    ``equal``: as many instances on either side. If ``control`` expires, the best choice so far has ``complete`` false.
    Raises InfeasibleError: no choice keeps the goal; the message says what the best one reaches.
    """
    control = control or SearchControl()
    enumeration = _Enumeration(attention, ffn, link, layers, equal)
    stage_s = tpot_s / IN_FLIGHT
    choice = enumeration.least(_Price(enumeration, stage_s, tokens_per_s), control)
    if choice is None:
        fastest = enumeration.least(_Stage(enumeration), control)
        if fastest is None or fastest.value > stage_s:
            slowest = np.inf if fastest is None else fastest.value
            raise InfeasibleError.at(
                "tpot_s",
                f"no choice reaches {tpot_s:g} s between tokens; the fastest takes {IN_FLIGHT * slowest:.6g} s",
                hint="allow more time, more or faster instances, or a faster link",
            )
        richest = enumeration.least(_Rate(enumeration, stage_s), control)
        rate = 0.0 if richest is None else -richest.value
        raise InfeasibleError.at(
            "tokens_per_s",
            f"within {tpot_s:g} s between tokens at most {rate:.6g} tokens/s are reached",
            hint="allow more instances or more time",
        )
    on_attention, on_ffn = -(-choice.batch // choice.x), -(-choice.batch // choice.y)
    return Sizing(
        choice.x,
        choice.y,
        choice.batch,
        float(layers * enumeration.attention_s[on_attention]),
        float(layers * enumeration.ffn_s[on_ffn]),
        float(layers * enumeration.link_s[max(on_attention, on_ffn)]),
        choice.value,
        choice.complete,
    )


@dataclass(frozen=True)
class _Choice:
    """Instances of both sides and a micro-batch, with the minimized value."""

    x: int
    y: int
    batch: int
    value: float
    complete: bool = True


class _Enumeration:
    """All choices, grouped by the tokens on one attention instance and on one feed-forward instance.

    The stage times depend only on these two numbers of tokens, a and f. For given a, f and x, the largest batch is
    min(a x, f y). Below y = a x / f, more feed-forward instances lower the price of a token; above it, fewer do.
    So only the two integers around a x / f are evaluated. Pairs (a, f) are visited in the order of a lower bound.

    ``attention_s``, ``ffn_s`` and ``link_s`` are seconds of one layer by tokens on the busiest instance, from index 1.
    ``largest`` is the largest micro-batch.
    """

    def __init__(self, attention: AfdSide, ffn: AfdSide, link: AnyLink, layers: int, equal: bool) -> None:
        self.largest = min(attention.max_instances * attention.max_tokens, ffn.max_instances * ffn.max_tokens)
        self.attention, self.ffn, self.layers, self.equal = attention, ffn, layers, equal
        self.most_x, self.most_y = attention.max_instances, ffn.max_instances
        if equal:
            self.most_x = self.most_y = min(attention.max_instances, ffn.max_instances)
        counts = [min(side.max_tokens, self.largest) for side in (attention, ffn)]
        self.attention_s = attention.layer_s(np.arange(counts[0] + 1))
        self.ffn_s = ffn.layer_s(np.arange(counts[1] + 1))
        self.link_s = link.layer_s(np.arange(max(counts) + 1))
        # The least of this and all larger numbers of tokens: a curve may fall.
        self.least_link_s = np.minimum.accumulate(self.link_s[::-1])[::-1]

    def stage_s(self, a: np.ndarray, f: np.ndarray) -> np.ndarray:
        """Seconds of the slowest stage in all layers, by tokens on one instance of either side."""
        compute_s = np.maximum(self.attention_s[a], self.ffn_s[f])
        return np.asarray(self.layers * np.maximum(compute_s, self.link_s[np.maximum(a, f)]))

    def largest_batch(self, a: np.ndarray, f: np.ndarray) -> np.ndarray:
        """Largest micro-batch with these tokens on one instance."""
        return np.asarray(np.minimum(np.minimum(a * self.most_x, f * self.most_y), self.largest))

    def least(self, objective: _Stage, control: SearchControl) -> _Choice | None:
        """The choice with the least value; of equal ones, that with the fewest instances. None if no choice is valid.

        When ``control`` expires, the best choice so far is returned.
        """
        if not self.equal and self.most_x * self.most_y <= _FEW_COUNTS:
            return self._least_of_few(objective, control)
        blocks = self._blocks()
        minima = objective.lower(self._least_stage_s(blocks), blocks[:, 1], blocks[:, 3])
        # Equal values matter only where the number of instances does.
        slack = _SLACK if objective.fewest else -_EQUAL
        best: _Choice | None = None
        for at in np.argsort(minima, kind="stable"):
            if not np.isfinite(minima[at]) or (best is not None and minima[at] > _above(best.value, slack)):
                break
            if best is not None and control.expired:
                return replace(best, complete=False)
            lower = self._lower(objective, blocks[at]).ravel()
            kept = np.flatnonzero(np.isfinite(lower) if best is None else lower <= _above(best.value, slack))
            kept = kept[np.argsort(lower[kept], kind="stable")]
            begin, count = 0, 1
            while begin < len(kept):
                first = lower[kept[begin]]
                if best is not None and first > _above(best.value, slack):
                    break
                if best is not None and control.expired:
                    return replace(best, complete=False)
                # Pairs that can only equal the best choice matter only with fewer instances.
                equals = best is not None and first >= _above(best.value, -_EQUAL)
                most_x = best.x if best is not None and equals else self.most_x
                chosen = kept[begin : begin + count]
                a, f = self._tokens(blocks[at], chosen)
                if not self.equal:
                    # With more attention instances than this, all feed-forward instances are full.
                    most_x = min(most_x, int((-(-f * self.most_y // a)).max()))
                best = self._evaluate(objective, a, f, most_x, best)
                begin += count
                count = max(1, min(2 * count, _CELLS // most_x))
        return best

    def _least_of_few(self, objective: _Stage, control: SearchControl) -> _Choice | None:
        """The best choice where there are few counts: all of them, at the largest batch of each number of tokens."""
        a, f = np.arange(1, len(self.attention_s)), np.arange(1, len(self.ffn_s))
        best: _Choice | None = None
        for x in range(1, self.most_x + 1):
            for y in range(1, self.most_y + 1):
                if best is not None and control.expired:
                    return replace(best, complete=False)
                max_batch = min(x * len(a), y * len(f), self.largest)
                batch = np.unique(np.minimum(np.concatenate([a * x, f * y]), max_batch))
                value = objective.value(np.array(x), np.array(y), batch)
                i = int(value.argmin())
                if np.isfinite(value[i]) and (best is None or value[i] < _above(best.value, -_EQUAL)):
                    best = _Choice(x, y, int(batch[i]), float(value[i]))
        return best

    def _blocks(self) -> np.ndarray:
        """First and last a, first and last f of each block of pairs; with equal counts, a and f are equal."""
        rows, columns = len(self.attention_s) - 1, len(self.ffn_s) - 1
        if self.equal:
            first = np.arange(1, min(rows, columns) + 1, _CELLS)
            last = np.minimum(first + _CELLS - 1, min(rows, columns))
            return np.stack([first, last, first, last], 1)
        edge = max(_EDGE, -(-max(rows, columns) // _MOST_BLOCKS))
        first_a, first_f = np.meshgrid(np.arange(1, rows + 1, edge), np.arange(1, columns + 1, edge), indexing="ij")
        last_a, last_f = np.minimum(first_a + edge - 1, rows), np.minimum(first_f + edge - 1, columns)
        return np.stack([part.ravel() for part in (first_a, last_a, first_f, last_f)], 1)

    def _least_stage_s(self, blocks: np.ndarray) -> np.ndarray:
        """Lower bound of the slowest stage in each block."""
        parts = []
        for layer_s, first in ((self.attention_s, blocks[:, 0]), (self.ffn_s, blocks[:, 2])):
            starts, place = np.unique(first, return_inverse=True)
            end = int(blocks[:, 1].max()) + 1 if self.equal else len(layer_s)
            parts.append(np.minimum.reduceat(layer_s[:end], starts)[place])
        parts.append(self.least_link_s[np.maximum(blocks[:, 0], blocks[:, 2])])
        return np.asarray(self.layers * np.maximum.reduce(parts))

    def _lower(self, objective: _Stage, block: np.ndarray) -> np.ndarray:
        """Lower bounds of a block's pairs."""
        first_a, last_a, first_f, last_f = block
        a, f = np.arange(first_a, last_a + 1), np.arange(first_f, last_f + 1)
        if not self.equal:
            a = a[:, None]
        return objective.lower(self.stage_s(a, f), a, f)

    def _tokens(self, block: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens on one instance of either side, of some pairs of a block."""
        first_a, _, first_f, last_f = block
        if self.equal:
            return first_a + places, first_a + places
        row, column = np.divmod(places, last_f - first_f + 1)
        return first_a + row, first_f + column

    def _evaluate(
        self, objective: _Stage, a: np.ndarray, f: np.ndarray, most_x: int, best: _Choice | None
    ) -> _Choice | None:
        """The better of ``best`` and the choices with some tokens on the instances."""
        for begin in range(1, most_x + 1, _CELLS):
            x = np.arange(begin, min(begin + _CELLS, most_x + 1))[None, :]
            full = np.minimum(a[:, None] * x, self.largest)
            below = full // f[:, None]
            for y in (x,) if self.equal else (below, below + (full > below * f[:, None])):
                y = np.clip(y, 1, self.most_y)
                batch = np.minimum(full, f[:, None] * y)
                value = objective.value(x, y, batch)
                least = float(value.min())
                if not np.isfinite(least) or (best is not None and least > _above(best.value, _EQUAL)):
                    continue
                rows, columns = np.nonzero(value <= _above(least, _EQUAL))
                ys = np.broadcast_to(y, value.shape)
                where = (x[0, columns], ys[rows, columns], value[rows, columns], batch[rows, columns])
                i = np.lexsort(where[::-1])[0]
                new = _Choice(int(where[0][i]), int(where[1][i]), int(where[3][i]), float(where[2][i]))
                if best is None or new.value < _above(best.value, -_EQUAL) or _order(new) < _order(best):
                    best = new
        return best


class _Stage:
    """Seconds of the slowest stage: a value of choices to minimize, and the base of other values.

    ``lower`` is a lower bound by the stage time and the tokens on one instance of either side. It falls with more
    tokens. ``fewest`` says whether, of equal choices, the one with the fewest instances is wanted.
    """

    fewest = False

    def __init__(self, enumeration: _Enumeration) -> None:
        self.enumeration = enumeration

    def lower(self, stage_s: np.ndarray, a: np.ndarray, f: np.ndarray) -> np.ndarray:
        return stage_s

    def value(self, x: np.ndarray, y: np.ndarray, batch: np.ndarray) -> np.ndarray:
        return self.enumeration.stage_s(-(-batch // x), -(-batch // y))


class _Rate(_Stage):
    """Negative tokens a second of the choices within the stage's limit."""

    def __init__(self, enumeration: _Enumeration, most_s: float) -> None:
        super().__init__(enumeration)
        self.most_s = most_s

    def lower(self, stage_s: np.ndarray, a: np.ndarray, f: np.ndarray) -> np.ndarray:
        return np.where(stage_s <= self.most_s, -self.enumeration.largest_batch(a, f) / stage_s, np.inf)

    def value(self, x: np.ndarray, y: np.ndarray, batch: np.ndarray) -> np.ndarray:
        stage_s = super().value(x, y, batch)
        return np.where(stage_s <= self.most_s, -batch / stage_s, np.inf)


class _Price(_Stage):
    """Price-seconds a token of the choices that keep the goal."""

    fewest = True

    def __init__(self, enumeration: _Enumeration, most_s: float, tokens_per_s: float) -> None:
        super().__init__(enumeration)
        self.most_s, self.tokens_per_s = most_s, tokens_per_s

    def lower(self, stage_s: np.ndarray, a: np.ndarray, f: np.ndarray) -> np.ndarray:
        enumeration = self.enumeration
        # Feed-forward instances for each attention instance at which neither waits, as far as the counts allow.
        ratio = np.ones(1) if enumeration.equal else np.clip(a / f, 1 / enumeration.most_x, enumeration.most_y)
        price = enumeration.attention.price + ratio * enumeration.ffn.price
        rate = enumeration.largest_batch(a, f) / stage_s
        good = (stage_s <= self.most_s) & (rate >= self.tokens_per_s)
        return np.where(good, stage_s * price / np.minimum(a, f * ratio), np.inf)

    def value(self, x: np.ndarray, y: np.ndarray, batch: np.ndarray) -> np.ndarray:
        stage_s = super().value(x, y, batch)
        good = (stage_s <= self.most_s) & (batch / stage_s >= self.tokens_per_s)
        price = x * self.enumeration.attention.price + y * self.enumeration.ffn.price
        return np.where(good, price * stage_s / batch, np.inf)


def _above(value: float, share: float) -> float:
    """A value that is larger by a share of its size."""
    return value + share * abs(value)


def _order(choice: _Choice) -> tuple[int, int, float, int]:
    """Order of choices whose values are equal up to rounding."""
    return choice.x, choice.y, choice.value, choice.batch


def colocated(
    *layers_in_turn: AfdSide, layers: int, tpot_s: float, tokens_per_s: float = 0.0, max_instances: int | None = None
) -> ColocatedPlan | None:
    """The cheapest batch of instances that compute all parts of a layer in turn; None if no batch keeps the goal.

    ``layers_in_turn``: parts of a layer, at one price. ``layers``, ``tpot_s``, ``tokens_per_s``: as in :func:`size`.
    """
    batches = np.arange(1, min(side.max_tokens for side in layers_in_turn) + 1)
    stage = layers * np.sum([side.layer_s(batches) for side in layers_in_turn], axis=0)
    instances = np.maximum(np.ceil(tokens_per_s * stage / batches * (1 - 1e-12)), 1.0)
    good = stage <= tpot_s
    if max_instances is not None:
        good &= instances <= max_instances
    if not good.any():
        return None
    cost = np.where(good, layers_in_turn[0].price * stage / batches, np.inf)
    i = int(cost.argmin())
    return ColocatedPlan(
        instances=int(instances[i]), batch=int(batches[i]), tpot_s=float(stage[i]), price_s_per_token=float(cost[i])
    )


def bound(attention: AfdSide, ffn: AfdSide, *, layers: int, tpot_s: float) -> float:
    """Price-seconds a token that no choice undercuts: both sides at their best batch, never waiting."""
    total = 0.0
    for side in (attention, ffn):
        batches = np.arange(1, side.max_tokens + 1)
        stage = layers * side.layer_s(batches)
        good = stage <= tpot_s / IN_FLIGHT
        total += float((side.price * stage / batches)[good].min())
    return total


def bandwidth_needed(sizing: Sizing, link: AfdLink, layers: int) -> float:
    """Bytes a second at which the link would no longer be the slowest stage (infinite: latency alone is)."""
    tokens = np.ceil(sizing.micro_batch / min(sizing.attention, sizing.ffn))
    left = max(sizing.attention_s, sizing.ffn_s) / (2 * layers) - link.alpha_s
    return float(tokens * link.bytes_per_token / left) if left > 0 else float("inf")
