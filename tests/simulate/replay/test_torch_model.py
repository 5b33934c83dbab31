"""Torch modules as layers of data-parallel training."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cdmpp.errors import InvalidProgramError
from cdmpp.plan.registry import PLANNERS
from cdmpp.simulate.replay.data_parallel import fill_buckets
from cdmpp.simulate.replay.torch_model import data_parallel_request, measure_layers


class Net(nn.Module):
    """Two layers with things between and behind them; one more that does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.body = nn.Linear(16, 4), nn.Linear(8, 16)  # not in the order of their calls
        self.idle = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.head(torch.relu(self.body(x))), -1)


def programs(cost: dict[str, list[dict[str, dict[str, object]]]]) -> list[object]:
    return [program["program"]["operator"] for program in cost["programs"]]


def test_layers_of_a_module() -> None:
    made = data_parallel_request(Net(), [torch.empty(32, 8)], "t4", ranks=2, link={"alpha_s": 1e-5}, bucket_bytes=[64])
    assert [layer["name"] for layer in made["layers"]] == ["body", "head"]
    assert [sorted(layer["gradient_bytes"]) for layer in made["layers"]] == [[64.0, 512.0], [16.0, 256.0]]
    body, head = made["layers"]
    assert (programs(body["forward"]), programs(head["forward"])) == (["linear", "relu"], ["linear", "softmax"])
    # The softmax' gradient comes before the head's, the relu's before the body's; the input needs none.
    assert programs(head["backward"]) == ["relu", "linear", "linear", "relu"]
    assert programs(body["backward"]) == ["relu", "linear", "relu"]
    price_requests = PLANNERS["data-parallel"].read(made).price_requests()
    assert len(price_requests) == 11 and {priced.protocol for priced in price_requests} == {"eager"}


def test_parameters_of_the_root_and_of_modules_that_are_not_called() -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.zeros(1, 1, 8))
            self.body = nn.MultiheadAttention(8, 2, batch_first=True)  # reads out_proj's weights, does not call it

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.cat((self.token.expand(len(x), -1, -1), x), 1)
            return self.body(x, x, x, need_weights=False)[0]

    made = data_parallel_request(Attending(), [torch.empty(3, 5, 8)], "t4", ranks=2, link={"alpha_s": 1e-5})
    gradient_bytes = {layer["name"]: sorted(layer["gradient_bytes"]) for layer in made["layers"]}
    assert gradient_bytes == {"Attending": [32.0], "body": [96.0, 768.0], "body.out_proj": [32.0, 256.0]}
    # In the order of the forward pass: gradients arrive the other way round.
    assert list(gradient_bytes) == ["Attending", "body", "body.out_proj"]


def test_kernels_without_an_operator_are_named() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.inv(self.body(x))

    with pytest.raises(InvalidProgramError, match="linalg_inv"):
        data_parallel_request(Odd(), [torch.empty(4, 4)], "t4", ranks=2, link={"alpha_s": 1e-5})


def test_measured_layers_make_up_the_iteration() -> None:
    net, x = Net(), torch.randn(32, 8)
    before = {name: p.clone() for name, p in net.named_parameters()}
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    measured = measure_layers(net, lambda: net(x).square().sum(), optimizer.step, repeats=3, warm=1)
    assert [layer.name for layer in measured.layers] == ["body", "head"]
    # In the order of the module, the last to arrive being the first.
    assert [sorted(layer.gradient_bytes) for layer in measured.layers] == [[64.0, 512.0], [16.0, 256.0]]
    assert all(layer.forward_s > 0 and layer.backward_s > 0 for layer in measured.layers)
    assert sum(layer.forward_s + layer.backward_s for layer in measured.layers) == pytest.approx(measured.iteration_s)
    assert measured.update_s > 0
    assert not torch.equal(net.body.weight, before["body.weight"])
    assert not net.body._forward_hooks and not net.body.weight._post_accumulate_grad_hooks


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_buckets_of_a_measured_module_are_those_of_ddp() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(32, 32), nn.ReLU())))
    x = torch.randn(4, 32)
    cap = 8192
    module = DistributedDataParallel(net, bucket_cap_mb=cap / 2**20)

    def step() -> torch.Tensor:
        result: torch.Tensor = module(x).sum()
        return result

    measured = measure_layers(net, step, lambda: None, repeats=2, warm=2)
    ddp_sizes = str(module._get_ddp_logging_data()["rebuilt_bucket_sizes"])
    theirs = [int(part) for part in ddp_sizes.split(",")]
    assert [int(bucket.bytes) for bucket in fill_buckets(measured.layers, cap)] == theirs
    assert len(theirs) == 3
