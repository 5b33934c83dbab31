"""Network variants of the ablation study: padding, batches, positions, device numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import ablations
from benchmarks.ablation_variants.network import NETWORKS, AbsoluteNetwork, StructuralNetwork, Variant
from cdmpp.model.nn.encoder import Part
from cdmpp.model.nn.network import LatencyNetwork
from cdmpp.train.config import TrainConfig
from cdmpp.train.loop import train
from tests.model.nn.synthetic import TINY, dataset, random_inputs, training

pytestmark = pytest.mark.slow


def network(kind: type[LatencyNetwork]) -> LatencyNetwork:
    """A variant with random weights, in evaluation mode."""
    torch.manual_seed(0)
    made = kind(TINY, 3)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return made.eval()


@torch.inference_mode()
def predict(net: LatencyNetwork, inputs: dict[str, torch.Tensor], mask: torch.Tensor | None = None) -> torch.Tensor:
    point: torch.Tensor = net(mask=mask, **inputs)[0]
    return point


@pytest.mark.parametrize("variant", NETWORKS)
@pytest.mark.parametrize("padding", [1, 3, 11])
def test_padding_does_not_change_the_prediction(variant: Variant, padding: int) -> None:
    net, inputs = network(NETWORKS[variant]), random_inputs(rows=7, leaves=5)
    mask = torch.arange(5 + padding).expand(7, -1) < 5
    junk = torch.full((7, padding, inputs["leaves"].shape[2]), 1e3)
    padded = inputs | {
        "leaves": torch.cat((inputs["leaves"], junk), dim=1),
        "positions": torch.cat((inputs["positions"], torch.full((7, padding), 99)), dim=1),
    }
    torch.testing.assert_close(predict(net, inputs), predict(net, padded, mask), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", NETWORKS)
@torch.inference_mode()
def test_leaf_counts_in_one_batch_equal_separate_batches(variant: Variant) -> None:
    net = network(NETWORKS[variant])
    several = [random_inputs(rows=3, leaves=leaves, seed=leaves) for leaves in (1, 2, 5)]
    masks = [None, None, torch.arange(5) < torch.tensor([[5], [1], [3]])]
    parts = [Part(i["leaves"], i["positions"], m) for i, m in zip(several, masks, strict=True)]
    inputs, logs = (torch.cat([i[name] for i in several]) for name in ("inputs", "logs"))
    separate = [
        net.encode(p.leaves, p.positions, p.mask, i["inputs"], i["logs"]) for p, i in zip(parts, several, strict=True)
    ]
    for multiple in (1, 64):
        together = net.encode_parts(parts, inputs, logs, multiple=multiple)
        torch.testing.assert_close(together, torch.cat(separate), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("variant", "sees_order"), [("no positions", False), ("structural", True)])
def test_positions_reach_the_variants_by_difference_or_not_at_all(variant: Variant, sees_order: bool) -> None:
    net, inputs = network(NETWORKS[variant]), random_inputs(rows=3, leaves=4)
    plain = predict(net, inputs)
    reverse = {"leaves": inputs["leaves"].flip(1), "positions": inputs["positions"].flip(1)}
    torch.testing.assert_close(plain, predict(net, inputs | reverse), rtol=1e-5, atol=1e-5)
    moved = predict(net, inputs | {"positions": inputs["positions"] + 3})
    assert not (moved != plain).all()
    mirrored = predict(net, inputs | {"positions": inputs["positions"].flip(1)})
    assert bool((mirrored != plain).all()) == sees_order


def test_distant_leaves_share_a_bias() -> None:
    net = network(StructuralNetwork)
    assert isinstance(net, StructuralNetwork)
    bias = net.structure(torch.tensor([[0, 1, 500, 900]]))
    assert bias.shape == (1, TINY.heads, 4, 4)
    torch.testing.assert_close(bias[:, :, 0, 2], bias[:, :, 0, 3])
    assert (bias[:, :, 0, 1] != bias[:, :, 1, 0]).all()


@pytest.mark.parametrize(("kind", "seen"), [(LatencyNetwork, False), (AbsoluteNetwork, True)])
def test_absolute_device_numbers_reach_the_head_of_the_absolute_variant_only(
    kind: type[LatencyNetwork], seen: bool
) -> None:
    inputs = random_inputs(rows=4, leaves=2)
    other = inputs | {"logs": inputs["logs"] + 1.0}
    net = network(kind)
    net.leaf_in.weight.data.zero_()  # leaves meet the device in every variant
    assert bool((predict(net, other) != predict(net, inputs)).all()) == seen


@pytest.mark.parametrize("variant", NETWORKS)
def test_variant_trains(tmp_path: Path, variant: Variant) -> None:
    trained, _ = train(dataset(), training(steps=3), tmp_path, make_network=NETWORKS[variant])
    assert isinstance(trained, NETWORKS[variant])
    assert np.isfinite(predict(trained, random_inputs(rows=4, leaves=2)).numpy()).all()


def test_every_study_has_a_valid_configuration() -> None:
    for study, variants in ablations.STUDIES.items():
        base = ablations.CPU if study == "cross-model domain loss" else ablations.BASE
        for change, _ in variants.values():
            TrainConfig.model_validate(ablations.merged(base, change))
            assert change.get("variant", "structural") in NETWORKS
