"""Lowered networks compute what torch computes: TVM's virtual machine runs their fused programs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cdmpp.frontends.relax_programs import fused
from cdmpp.frontends.torch_programs import relax_module
from cdmpp.zoo import parse_network

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
def test_tvm_computes_what_torch_computes(text: str) -> None:
    import tvm
    from tvm import relax

    network = parse_network(text)
    module, weights = relax_module(torch.export.export(network.module, network.inputs))
    parameters = [parameter.name for parameter in module["main"].params][len(network.inputs) :]
    module = relax.transform.BindParams("main", dict(zip(parameters, weights, strict=True)))(module)
    machine = relax.VirtualMachine(tvm.compile(fused(module), "llvm"), tvm.cpu())
    result = machine["main"](*(tvm.runtime.tensor(value.numpy()) for value in network.inputs))
    found = (result if hasattr(result, "numpy") else result[0]).numpy()
    expected = network.module(*network.inputs).numpy()
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max()
