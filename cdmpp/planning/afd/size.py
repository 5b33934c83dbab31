"""Instance counts of attention-FFN disaggregation: an exact enumeration (Step-3).

A decoding step takes a micro-batch of B tokens through L layers. In each layer x attention instances hold
B/x sequences each, y feed-forward instances compute B/y tokens each, and activations travel there and back.
Three micro-batches are in flight, one in each stage, so a token takes

    TPOT = 3 L max(attention(B/x), ffn(B/y), communication)

and the service gives B tokens in L max(...) seconds. Every (x, y, B) is tried; there is nothing to search.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cdmpp.compose.pricing import interpolate
from cdmpp.errors import InfeasibleError

#: Micro-batches in flight: one in attention, one on the links, one in the feed-forward layer.
IN_FLIGHT = 3


@dataclass(frozen=True)
class Side:
    """The attention or the feed-forward instances.

    Attributes
    ----------
    sizes, seconds : array, shape (points,)
        Seconds of one layer by tokens on one instance.
    most : int
        Instances that may be used.
    price : float
        Of one instance, per hour or in any unit; 1 counts devices.
    max_tokens : int
        Tokens that one instance may hold (KV memory of attention).
    """

    sizes: np.ndarray
    seconds: np.ndarray
    most: int
    price: float
    max_tokens: int

    def layer_s(self, tokens: np.ndarray) -> np.ndarray:
        """Seconds of one layer; infinite beyond ``max_tokens``."""
        out: np.ndarray = np.where(tokens <= self.max_tokens, interpolate(self.sizes, self.seconds, tokens), np.inf)
        return out


@dataclass(frozen=True)
class Link:
    """One instance's link: ``alpha_s`` a message, ``bytes_per_token`` each way at ``bandwidth``."""

    bytes_per_token: float
    bandwidth_bytes_per_s: float
    alpha_s: float = 0.0

    def layer_s(self, tokens: np.ndarray) -> np.ndarray:
        """Seconds of one layer, there and back, through the link that carries most tokens."""
        out: np.ndarray = 2 * (self.alpha_s + tokens * self.bytes_per_token / self.bandwidth_bytes_per_s)
        return out


@dataclass(frozen=True)
class Sizing:
    """A choice, its stages (seconds of a micro-batch in all layers), its cost in price-seconds a token."""

    attention: int
    ffn: int
    micro_batch: int
    attention_s: float
    ffn_s: float
    communication_s: float
    price_s_per_token: float

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
    attention: Side,
    ffn: Side,
    link: Link,
    *,
    layers: int,
    tpot_s: float,
    tokens_per_s: float = 0.0,
    micro_batch: int | None = None,
    equal: bool = False,
) -> Sizing:
    """The cheapest choice per token that keeps the goal; equal ones: fewer instances, smaller batch.

    Parameters
    ----------
    attention, ffn : Side
    link : Link
    layers : int
    tpot_s : float
        Most seconds between two tokens.
    tokens_per_s : float
        Fewest tokens a second of the whole service.
    micro_batch : int, optional
        Largest micro-batch to try; default: what all attention instances hold.
    equal : bool
        As many instances on either side.

    Raises
    ------
    InfeasibleError
        No choice keeps the goal; the message says what the best one reaches.
    """
    held = attention.most * attention.max_tokens
    most = min(held if micro_batch is None else micro_batch, held, ffn.most * ffn.max_tokens)
    batches = np.arange(1, most + 1)
    stage_limit = tpot_s / IN_FLIGHT
    at_y = [ffn.layer_s(np.ceil(batches / y)) for y in range(1, ffn.most + 1)]
    best: Sizing | None = None
    fastest = np.inf  # TPOT of the fastest choice, and most tokens a second within the goal
    richest = 0.0
    for x in range(1, attention.most + 1):
        at_x = attention.layer_s(np.ceil(batches / x))
        for y in range(1, ffn.most + 1):
            if equal and x != y:
                continue
            moved = link.layer_s(np.ceil(batches / min(x, y)))
            stage = layers * np.maximum(np.maximum(at_x, at_y[y - 1]), moved)
            fastest = min(fastest, float(stage.min()))
            good = stage <= stage_limit
            if not good.any():
                continue
            rate = batches / stage
            richest = max(richest, float(rate[good].max()))
            good &= rate >= tokens_per_s
            if not good.any():
                continue
            price = x * attention.price + y * ffn.price
            cost = np.where(good, price * stage / batches, np.inf)
            i = int(cost.argmin())
            if best is None or float(cost[i]) < best.price_s_per_token * (1 - 1e-12):
                best = Sizing(
                    x,
                    y,
                    int(batches[i]),
                    float(layers * at_x[i]),
                    float(layers * at_y[y - 1][i]),
                    float(layers * moved[i]),
                    float(cost[i]),
                )
    if best is None:
        if not np.isfinite(fastest) or fastest > stage_limit:
            raise InfeasibleError(
                f"tpot_s: no choice reaches {tpot_s:g} s between tokens; the fastest takes {IN_FLIGHT * fastest:.6g} s",
                path="tpot_s",
                hint="allow more time, more or faster instances, or a faster link",
            )
        raise InfeasibleError(
            f"tokens_per_s: within {tpot_s:g} s between tokens at most {richest:.6g} tokens/s are reached",
            path="tokens_per_s",
            hint="allow more instances or more time",
        )
    return best


@dataclass(frozen=True)
class Colocated:
    """Equal instances that each compute whole layers; they share nothing.

    Attributes
    ----------
    instances : int
        As many as the goal needs.
    batch : int
        Sequences on each instance.
    tpot_s : float
    price_s_per_token : float
    """

    instances: int
    batch: int
    tpot_s: float
    price_s_per_token: float


def colocated(
    *layers_in_turn: Side, layers: int, tpot_s: float, tokens_per_s: float = 0.0, most: int | None = None
) -> Colocated | None:
    """The cheapest batch of instances that compute all parts of a layer in turn; None if no batch keeps the goal.

    Parameters
    ----------
    *layers_in_turn : Side
        Parts of a layer, at one price.
    layers, tpot_s, tokens_per_s
        As :func:`size` takes them.
    most : int, optional
        Instances that may be used.
    """
    batches = np.arange(1, min(side.max_tokens for side in layers_in_turn) + 1)
    stage = layers * np.sum([side.layer_s(batches) for side in layers_in_turn], axis=0)
    instances = np.maximum(np.ceil(tokens_per_s * stage / batches * (1 - 1e-12)), 1.0)
    good = stage <= tpot_s
    if most is not None:
        good &= instances <= most
    if not good.any():
        return None
    cost = np.where(good, layers_in_turn[0].price * stage / batches, np.inf)
    i = int(cost.argmin())
    return Colocated(int(instances[i]), int(batches[i]), float(stage[i]), float(cost[i]))


def bound(attention: Side, ffn: Side, *, layers: int, tpot_s: float) -> float:
    """Price-seconds a token that no choice undercuts: both sides at their best batch, never waiting."""
    total = 0.0
    for side in (attention, ffn):
        batches = np.arange(1, side.max_tokens + 1)
        stage = layers * side.layer_s(batches)
        good = stage <= tpot_s / IN_FLIGHT
        total += float((side.price * stage / batches)[good].min())
    return total


def bandwidth_needed(sizing: Sizing, link: Link, layers: int) -> float:
    """Bytes a second at which the link would no longer be the slowest stage (infinite: latency alone is)."""
    tokens = np.ceil(sizing.micro_batch / min(sizing.attention, sizing.ffn))
    left = max(sizing.attention_s, sizing.ffn_s) / (2 * layers) - link.alpha_s
    return float(tokens * link.bytes_per_token / left) if left > 0 else float("inf")
