"""Every network lowers to distinct tasks with nothing left over."""

from collections.abc import Callable

import pytest

from benchmarks.coverage import DOCS, coverage_table, table_of
from cdmpp.programs.frontends.tasks import TaskList
from cdmpp.programs.tvm_json import load, prim_funcs
from cdmpp.programs.zoo import network_names

pytestmark = [pytest.mark.tvm, pytest.mark.slow]


#: One network of each module of the zoo. The other networks are lowered by `make test-nightly`.
ONE_PER_MODULE = {
    *("audio-encoder", "bert-packed", "bert-tiny", "dcgan", "dsv-attention", "llama-decode", "mixer", "moe-top1"),
    *("recommender", "reductions", "resnet18", "vgg11", "wavenet"),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ONE_PER_MODULE else pytest.mark.nightly)
        for name in sorted({*network_names(), *ONE_PER_MODULE})
    ],
)
def test_network_lowers(name: str, lowered: Callable[[str], TaskList]) -> None:
    result = lowered(name)
    assert result.network == result.source == name and result.unsupported == ()
    assert len({task.hash for task in result.tasks}) == len(result.tasks) >= 5
    assert all(task.calls >= 1 for task in result.tasks)
    for task in result.tasks:
        nodes, root = load(task.tvm_json)
        assert list(prim_funcs(nodes, root)) == ["main"]
        assert not task.name.startswith(("reshape", "expand_dims", "squeeze"))


@pytest.mark.nightly
def test_networks_differ(lowered: Callable[[str], TaskList]) -> None:
    """Networks share programs (nextstep has a LLaMA block within), but no two are the same."""
    sets = {frozenset(task.hash for task in lowered(name).tasks) for name in network_names()}
    assert len(sets) == len(network_names())


def test_a_density_makes_other_products() -> None:
    from cdmpp.programs.frontends.tasks import network_tasks

    sparse, dense = (network_tasks(f"dsv-attention:seq=128,block=32,density={d}") for d in (0.25, 1.0))
    products = [
        {task.hash for task in result.tasks if "matmul" in task.name or "softmax" in task.name}
        for result in (sparse, dense)
    ]
    assert len(products[0]) == len(products[1]) == 3 and not products[0] & products[1]


@pytest.mark.nightly
def test_the_coverage_table_is_up_to_date(lowered: Callable[[str], TaskList]) -> None:
    """It is here and not in test_coverage.py so that one process lowers all networks."""
    table = coverage_table(lowered)
    print(table)  # shown with pytest -s, and where the comparison fails
    assert table_of(DOCS.read_text(encoding="utf-8")) == table, "python -m benchmarks.coverage --write"
