"""Lowered networks compute what torch computes: TVM's virtual machine runs their fused programs."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from cdmpp.programs.frontends.relax_programs import fused, programs_of_fused, relax_module
from cdmpp.programs.frontends.tasks import TaskList
from cdmpp.programs.zoo import parse_network

pytestmark = [pytest.mark.tvm, pytest.mark.slow]

#: Largest error, as a share of the largest output; float32 sums in another order.
TOLERANCE = 1e-4


@pytest.mark.parametrize(
    "text",
    [
        "resnet18:image=32",
        "bert-tiny:seq=8,layers=1",
        "dcgan:width=4",
        "llama-decode:past=8,width=64",
        "dsv-attention:seq=32,block=8",
        "moe-adaptive:tokens=8,width=16,hidden=16",
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch, for what TVM's importer does
def test_tvm_results_equal_torch_results(text: str, lowered: Callable[[str], TaskList]) -> None:
    import tvm
    from tvm import relax

    network = parse_network(text)
    module, weights = relax_module(torch.export.export(network.module, network.inputs))
    # Weights are arguments like the inputs: what is computed of them runs as well, and is not folded at a
    # compiler run each.
    module["main"] = module["main"].without_attr("num_input")
    module = fused(module)
    # What runs are the tasks, and what is computed of weights.
    assert {t.hash for t in lowered(text).tasks} <= {p.hash for p in programs_of_fused(module, text).programs}
    machine = relax.VirtualMachine(tvm.compile(module, "llvm"), tvm.cpu())
    inputs = (tvm.runtime.tensor(value.numpy()) for value in network.inputs)
    result = machine["main"](*inputs, *weights)
    found = (result if hasattr(result, "numpy") else result[0]).numpy()
    expected = network.module(*network.inputs).numpy()
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max()
