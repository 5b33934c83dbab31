"""Variants of the study of scheduled programs."""

import numpy as np
import pytest
import torch

from benchmarks.schedules.study import LAUNCH_COLUMNS, SumOfLeaves, blind, box_cox
from cdmpp.model.nn.config import NetworkConfig
from cdmpp.model.nn.inputs import DEVICE_LOGS, INPUT_WIDTH
from cdmpp.model.nn.network import LatencyNetwork, PaddedRows

CONFIG = NetworkConfig(width=16, layers=1, heads=2, head_width=16, schedule=True)


def test_box_cox_has_an_inverse() -> None:
    logs = np.log(np.random.default_rng(0).lognormal(-9, 1, 500))
    label_of, inverse = box_cox(logs)
    assert inverse(label_of(logs)) == pytest.approx(logs) and label_of(logs).std() == pytest.approx(logs.std())


@pytest.mark.parametrize(
    ("kind", "reads"),
    [
        (LatencyNetwork, [True, True, True]),
        (SumOfLeaves, [False, True, True]),
        (blind(LAUNCH_COLUMNS), [True, False, True]),
        (blind(slice(0), reads_device=False), [True, True, False]),
    ],
)
def test_token_reads_other_leaf_launch_and_device(kind: type[LatencyNetwork], reads: list[bool]) -> None:
    torch.manual_seed(0)
    network, leaves = kind(CONFIG, 1), torch.rand(4, 2, CONFIG.leaf_width)
    leaves[1:] = leaves[0]
    leaves[1, 1], leaves[2, :, LAUNCH_COLUMNS] = 0, 0
    device = (torch.arange(4) == 3).float()[:, None]
    part = PaddedRows(leaves, torch.zeros(4, 2, dtype=torch.int32), None)
    first = network._first_tokens([part], device.expand(-1, INPUT_WIDTH), device.expand(-1, len(DEVICE_LOGS)), 1)
    token = network._layer(first, "layers.0", [part]).detach().view(4, 2, -1)[:, 0]
    assert [not torch.allclose(changed, token[0], atol=1e-6) for changed in token[1:]] == reads
