"""Layers of the network by name: its arrays and its torch form are made from this table."""

from __future__ import annotations

from typing import Literal, NamedTuple

from cdmpp.model.nn.config import ADD, LEVELS, OVERLAP, NetworkConfig, member_prefixes
from cdmpp.model.nn.inputs import DEVICE_LOGS, INPUT_WIDTH

Shape = tuple[int, ...]


class NetworkLayer(NamedTuple):
    """One layer of the network."""

    kind: Literal["linear", "norm", "embedding"]  # an embedding has no bias: a row for each device
    # Columns; of the embedding, rows and columns.
    inputs: int
    outputs: int
    zero: bool = False  # its weights start at 0


def member_layers(config: NetworkConfig, devices: int) -> dict[str, NetworkLayer]:
    """Layers of one member, in the order in which their initial weights are drawn."""
    width, head = config.width, config.head_width
    leaf = config.leaf_width + len(DEVICE_LOGS)
    out = {"leaf_in": NetworkLayer("linear", leaf, width)}
    if config.leaf_hidden:
        out["leaf_hidden.in"] = NetworkLayer("linear", leaf, config.leaf_hidden)
        out["leaf_hidden.out"] = NetworkLayer("linear", config.leaf_hidden, width, zero=True)
    out["condition"] = NetworkLayer("linear", INPUT_WIDTH, width)
    for layer in (f"layers.{i}" for i in range(config.layers)):
        out[f"{layer}.norm_attention"] = NetworkLayer("norm", width, width)
        out[f"{layer}.qkv"] = NetworkLayer("linear", width, 3 * width)
        out[f"{layer}.out"] = NetworkLayer("linear", width, width)
        out[f"{layer}.norm_feed"] = NetworkLayer("norm", width, width)
        out[f"{layer}.feed.0"] = NetworkLayer("linear", width, config.feed_forward)
        out[f"{layer}.feed.2"] = NetworkLayer("linear", config.feed_forward, width)
    out["pool_norm"] = NetworkLayer("norm", width, width)
    out["pool_score"] = NetworkLayer("linear", width, config.heads)
    if config.schedule:
        out["leaf_times.norm"] = NetworkLayer("norm", width, width)
        out["leaf_times.hidden"] = NetworkLayer("linear", width, width)
        out["leaf_times.costs"] = NetworkLayer("linear", width, len(OVERLAP) + len(ADD) + 1, zero=True)
        out["leaf_times.call"] = NetworkLayer("linear", INPUT_WIDTH, 1, zero=True)
    out["device"] = NetworkLayer("embedding", devices + 1, config.device_width)
    latent = 2 * width + (2 if config.schedule else 0)
    out["head_in"] = NetworkLayer("linear", latent + INPUT_WIDTH + config.device_width, head)
    for layer in (f"head.{i}" for i in range(config.head_layers)):
        out[f"{layer}.norm"] = NetworkLayer("norm", head, head)
        out[f"{layer}.up"] = NetworkLayer("linear", head, head)
        out[f"{layer}.down"] = NetworkLayer("linear", head, head, zero=True)
    out[f"head.{config.head_layers}"] = NetworkLayer("norm", head, head)
    out["out"] = NetworkLayer("linear", head, (4 if config.head == "structured" else 1) + len(LEVELS), zero=True)
    if config.schedule:
        out["timed"] = NetworkLayer("linear", head, 1, zero=True)
    return out


def shapes(config: NetworkConfig, devices: int) -> dict[str, Shape]:
    """Shape of every array of a network."""
    leaf = config.leaf_width
    member: dict[str, Shape] = {"leaf_mean": (leaf,), "leaf_scale": (leaf,)}
    member |= {"input_mean": (INPUT_WIDTH,), "input_scale": (INPUT_WIDTH,)}
    for name, layer in member_layers(config, devices).items():
        sizes = {"linear": (layer.outputs, layer.inputs), "embedding": (layer.inputs, layer.outputs)}
        member[f"{name}.weight"] = sizes.get(layer.kind, (layer.outputs,))
        if layer.kind != "embedding":
            member[f"{name}.bias"] = (layer.outputs,)
    return {prefix + name: shape for prefix in member_prefixes(config) for name, shape in member.items()}
