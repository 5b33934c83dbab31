"""The network: masks, orders, quantiles, sizes."""

import math
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cdmpp.model.nn.config import LEVELS, NetworkConfig, Positions
from cdmpp.model.nn.network import LatencyNetwork, PaddedRows, parameter_count
from cdmpp.model.nn.positions import encode_positions
from cdmpp.train.config import load_config
from tests.model.nn.synthetic import TINY, network, random_inputs

RATIO = replace(TINY, head="ratio")


@torch.inference_mode()
def answer(
    net: LatencyNetwork, inputs: dict[str, torch.Tensor], mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    point, quantiles = net(mask=mask, **inputs)
    return point, quantiles


VARIANTS = {
    "structured": TINY,
    "ratio": RATIO,
    "members": replace(TINY, members=2),
    **{f"positions-{kind}": replace(TINY, positions=kind) for kind in get_args(Positions)},
}


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("padding", [1, 3, 11])
def test_padding_changes_nothing(config: NetworkConfig, padding: int) -> None:
    net, inputs = network(config=config), random_inputs(rows=7, leaves=5)
    plain = answer(net, inputs, None)
    mask = torch.arange(5 + padding).expand(7, -1) < 5
    # Whatever stands in the padding.
    junk = torch.full((7, padding, inputs["leaves"].shape[2]), 1e3)
    padded = inputs | {
        "leaves": torch.cat((inputs["leaves"], junk), dim=1),
        "positions": torch.cat((inputs["positions"], torch.full((7, padding), 99)), dim=1),
    }
    for one, two in zip(plain, answer(net, padded, mask), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
@torch.inference_mode()
def test_leaf_counts_together_are_as_one_by_one(config: NetworkConfig) -> None:
    net = network(config=config)
    several = [random_inputs(rows=3, leaves=leaves, seed=leaves) for leaves in (1, 2, 5)]
    masks = [None, None, torch.arange(5) < torch.tensor([[5], [1], [3]])]
    parts = [PaddedRows(i["leaves"], i["positions"], m) for i, m in zip(several, masks, strict=True)]
    inputs, logs = (torch.cat([i[name] for i in several]) for name in ("inputs", "logs"))
    alone = [
        net.encode(p.leaves, p.positions, p.mask, i["inputs"], i["logs"]) for p, i in zip(parts, several, strict=True)
    ]
    for multiple in (1, 64):
        together = net.encode_parts(parts, inputs, logs, multiple=multiple)
        torch.testing.assert_close(together, torch.cat(alone), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_rows_do_not_see_each_other(config: NetworkConfig) -> None:
    net, inputs = network(config=config), random_inputs(rows=16, leaves=4)
    mask = torch.arange(4) < torch.randint(1, 5, (16, 1), generator=torch.Generator().manual_seed(1))
    order = torch.randperm(16, generator=torch.Generator().manual_seed(2))
    shuffled = {name: value[order] for name, value in inputs.items()}
    point, quantiles = answer(net, inputs, mask)
    moved_point, moved_quantiles = answer(net, shuffled, mask[order])
    torch.testing.assert_close(moved_point, point[order], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(moved_quantiles, quantiles[order], rtol=1e-6, atol=1e-6)
    changed = {name: value.clone() for name, value in inputs.items()}
    changed["leaves"][0] += 5
    np.testing.assert_allclose(answer(net, changed, mask)[0][1:], point[1:], rtol=1e-6)
    assert answer(net, changed, mask)[0][0] != point[0]


@pytest.mark.parametrize("kind", get_args(Positions))
def test_leaves_are_told_apart_by_position_alone(kind: Positions) -> None:
    net = network(config=replace(TINY, positions=kind))
    inputs = random_inputs(rows=3, leaves=4)
    plain = answer(net, inputs, None)[0]
    reverse = {"leaves": inputs["leaves"].flip(1), "positions": inputs["positions"].flip(1)}
    torch.testing.assert_close(plain, answer(net, inputs | reverse, None)[0], rtol=1e-5, atol=1e-5)
    moved = answer(net, inputs | {"positions": inputs["positions"] + 3}, None)[0]
    assert (moved != plain).all()
    mirrored = answer(net, inputs | {"positions": inputs["positions"].flip(1)}, None)[0]
    assert (mirrored != plain).all()


@settings(max_examples=40)
@given(st.integers(0, 1000), st.sampled_from([TINY, RATIO]))
def test_quantiles_never_cross(seed: int, config: NetworkConfig) -> None:
    net, inputs = network(seed, config), random_inputs(rows=20, leaves=3, seed=seed)
    with torch.no_grad():
        net.out.weight.mul_(30)
    point, quantiles = answer(net, inputs, None)
    assert quantiles.shape == (20, len(LEVELS))
    assert torch.isfinite(quantiles).all()
    assert torch.isfinite(point).all()
    assert (quantiles.diff(dim=1) >= 0).all()


def test_a_fresh_network_predicts_near_the_reference() -> None:
    torch.manual_seed(0)
    net = LatencyNetwork(RATIO, 3).eval()
    point, quantiles = answer(net, random_inputs(rows=5, leaves=3), None)
    assert (point == 0).all()
    assert (quantiles[:, LEVELS.index(0.5)] == 0).all()


def test_the_prediction_is_the_mean_of_the_members() -> None:
    net, inputs = network(config=replace(TINY, members=3)), random_inputs(rows=6, leaves=4)
    both = answer(net, inputs, None)
    parts = []
    for member in net.all_members():
        alone = LatencyNetwork(TINY, 3).eval()
        alone.load_state_dict({n: v for n, v in member.state_dict().items() if not n.startswith("members.")})
        parts.append(answer(alone, inputs, None))
    assert (parts[0][0] - parts[1][0]).abs().max() > 0.01
    for mean, own in zip(both, zip(*parts, strict=True), strict=True):
        torch.testing.assert_close(mean, torch.stack(own).mean(dim=0))


def test_hidden_devices_share_one_embedding() -> None:
    net, inputs = network(), random_inputs(rows=4, leaves=3)
    hidden = answer(net, inputs | {"device": torch.zeros(4, dtype=torch.long)}, None)[0]
    known = answer(net, inputs | {"device": torch.full((4,), 2)}, None)[0]
    assert (hidden != known).all()


@pytest.mark.parametrize("path", sorted(Path("configs").glob("*.toml")), ids=lambda p: p.name)
def test_shipped_networks_have_less_than_three_million_parameters(path: Path) -> None:
    assert parameter_count(LatencyNetwork(load_config(path).network, 64)) < 3_000_000


def test_positional_encoding_is_the_standard_formula() -> None:
    width, positions = 12, [0, 1, 5, 17, 250]
    encoding = encode_positions("standard", np.array(positions), width)
    assert encoding.shape == (5, width)
    for row, p in enumerate(positions):
        for i in range(width // 2):
            angle = p / 10000 ** (2 * i / width)
            assert encoding[row, 2 * i] == pytest.approx(math.sin(angle), abs=2e-5)
            # The same frequency, and no doubled exponent: what the reference implementation got wrong.
            assert encoding[row, 2 * i + 1] == pytest.approx(math.cos(angle), abs=2e-5)


def test_published_encoding_is_what_the_reference_computes() -> None:
    width, positions = 164, [0, 1, 100]
    encoding = encode_positions("published", np.array(positions), width)
    for row, p in enumerate(positions):
        for i in range(0, width, 2):
            assert encoding[row, i] == pytest.approx(math.sin(p / 10000 ** (2 * i / width)), abs=2e-5)
            assert encoding[row, i + 1] == pytest.approx(math.cos(p / 10000 ** (2 * (i + 1) / width)), abs=2e-5)
    # Almost half of its sines stay near zero even far into a program.
    assert (np.abs(encoding[2, ::2][-40:]) < 0.01).all()


def test_standardised_inputs_are_bounded() -> None:
    net = network()
    net.input_mean.fill_(2.0)
    net.input_scale.fill_(0.5)
    inputs = random_inputs(rows=2, leaves=1)["inputs"]
    torch.testing.assert_close(net.standardise(inputs), (inputs - 2) / 2)
    assert net.standardise(inputs * 1e6).abs().max() == 6


@pytest.mark.parametrize("field", ["width", "layers", "heads", "head_width"])
def test_impossible_configurations(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        NetworkConfig(**{field: 0})
