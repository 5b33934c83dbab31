"""The network in ONNX Runtime says what the network in torch says, for every choice of the configuration."""

import itertools
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import onnx
import pytest
import torch

from cdmpp.features.schedule import LAUNCH_FROM
from cdmpp.features.schema import WIDTH
from cdmpp.model.inference.engine import Engine, engine_of
from cdmpp.model.nn.config import NetworkConfig, Positions
from cdmpp.model.nn.inputs import DEVICE_LOGS, INPUT_WIDTH
from cdmpp.model.nn.layers import shapes
from cdmpp.model.nn.network import LatencyNetwork
from cdmpp.model.nn.network_graph import network_graph
from cdmpp.model.nn.positions import encode_positions
from cdmpp.model.nn.weights import VIEW_COLUMNS, Weights
from cdmpp.predict.predictor import LatencyPredictor
from tests.model.nn.synthetic import TINY, network

pytestmark = pytest.mark.slow

CONFIGS = [
    replace(TINY, positions=p, head=h, schedule=s)
    for p, h, s in itertools.product(get_args(Positions), ("ratio", "structured"), (False, True))
] + [replace(TINY, schedule=True, members=3, leaf_hidden=12, timed_members=count) for count in (8, 1)]
#: Relative error of a latency, so of the exponential of what is compared.
TOLERANCE = 1e-5


def weights_of(net: LatencyNetwork) -> Weights:
    state = {name: value.numpy() for name, value in net.state_dict().items()}
    return Weights(net.config, net.device.num_embeddings - 1, state)


def random_feed(config: NetworkConfig, rows: int, leaves: int) -> dict[str, Any]:
    """Inputs of both: every third program has no schedule, every fourth threads, every second a padded leaf."""
    rng = np.random.default_rng(rows * leaves)
    mask = np.ones((rows, leaves), dtype=bool)
    mask[1::2, 1:][:, -1:] = False
    features = (rng.random((rows, leaves, config.leaf_width)) * 8).astype(np.float32)
    features[::3, :, WIDTH:] = 0
    features[np.arange(rows) % 4 > 0, :, WIDTH + LAUNCH_FROM :] = 0
    return {
        "leaves": features,
        "mask": mask,
        "inputs": rng.standard_normal((rows, INPUT_WIDTH)).astype(np.float32),
        "logs": rng.standard_normal((rows, len(DEVICE_LOGS))).astype(np.float32),
        "device": rng.integers(0, 4, rows),
        "positions": np.sort(rng.integers(0, 60, (rows, leaves)), axis=1),
    }


def torch_outputs(net: LatencyNetwork, feed: dict[str, Any]) -> list[Any]:
    t = {name: torch.from_numpy(value) for name, value in feed.items()}
    with torch.inference_mode():
        standardised = net.standardise(t["inputs"])
        latent = net.encode(t["leaves"], t["positions"], t["mask"], standardised, t["logs"])
        return [value.numpy() for value in net.decode_with_hidden(latent, standardised, t["device"])]


def graph_feed(weights: Weights, feed: dict[str, Any]) -> dict[str, Any]:
    """Inputs of the ONNX graph: encoded positions instead of positions."""
    places = encode_positions(weights.config.positions, feed["positions"], weights.config.width)
    return {name: value for name, value in feed.items() if name != "positions"} | {"places": places}


def graph_outputs(weights: Weights, feed: dict[str, Any]) -> list[Any]:
    engine = engine_of(weights)
    outputs: list[Any] = engine._session.run(None, graph_feed(weights, feed))
    return outputs


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_graph_equals_torch(config: NetworkConfig) -> None:
    net = network(config=config)
    weights = weights_of(net)
    onnx.checker.check_model(network_graph(config, weights.arrays, weights.view()), full_check=True)
    for rows, leaves in ((1, 1), (5, 3), (32, 8)):
        feed = random_feed(config, rows, leaves)
        expected, got = torch_outputs(net, feed), graph_outputs(weights, feed)
        np.testing.assert_allclose(got[0], expected[0], atol=TOLERANCE)
        np.testing.assert_allclose(got[1], expected[1], atol=TOLERANCE)
        np.testing.assert_allclose(got[2], expected[2] @ weights.view(), atol=TOLERANCE)
        assert (np.diff(got[1], axis=1) >= 0).all()


def test_the_shipped_network_too(predictor: LatencyPredictor) -> None:
    weights = predictor.artifact.weights
    feed = random_feed(weights.config, 32, 4)
    mean, scale = weights.arrays["input_mean"], weights.arrays["input_scale"]
    feed["inputs"] = (mean + feed["inputs"] / np.maximum(scale, 1e-3)).astype(np.float32)
    expected, got = torch_outputs(weights.network, feed), graph_outputs(weights, feed)
    np.testing.assert_allclose(got[0], expected[0], atol=TOLERANCE)
    np.testing.assert_allclose(got[1], expected[1], atol=TOLERANCE)


def test_values_of_padding_change_nothing() -> None:
    config = replace(TINY, schedule=True)
    weights = weights_of(network(config=config))
    feed = random_feed(config, 6, 4)
    before = graph_outputs(weights, feed)
    feed["leaves"][~feed["mask"]] = 7.0
    for one, two in zip(before, graph_outputs(weights, feed), strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_shapes_are_those_of_the_network(config: NetworkConfig) -> None:
    net = LatencyNetwork(config, 3)
    assert shapes(config, 3) == {name: tuple(value.shape) for name, value in net.state_dict().items()}
    assert weights_of(net).parameters == sum(p.numel() for p in net.parameters())


def test_weights_of_another_network_are_refused() -> None:
    arrays = weights_of(network()).arrays
    for changed, words in (
        ({k: v for k, v in arrays.items() if k != "out.bias"}, "lack out.bias"),
        (arrays | {"wings": np.zeros(1, np.float32)}, "superfluous wings"),
        (arrays | {"out.bias": np.zeros(3, np.float32)}, "out.bias has the shape"),
    ):
        with pytest.raises(ValueError, match=words):
            Weights(TINY, 3, changed)


def test_several_threads_agree_except_for_the_last_digit() -> None:
    weights = weights_of(network())
    two = Engine(weights.config, weights.arrays, weights.view(), threads=2)
    feed = random_feed(weights.config, 64, 3)
    for one, other in zip(graph_outputs(weights, feed), two._session.run(None, graph_feed(weights, feed)), strict=True):
        np.testing.assert_allclose(one, other, atol=TOLERANCE)
    assert one.shape == (64, VIEW_COLUMNS)
