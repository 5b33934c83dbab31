"""Every network lowers to distinct tasks with nothing left over."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cdmpp.frontends.tasks import TaskList
from cdmpp.programs.tvm_json import load, prim_funcs
from cdmpp.zoo import network_names

pytestmark = [pytest.mark.tvm, pytest.mark.slow]


@pytest.mark.parametrize("name", network_names())
def test_network_lowers(name: str, lowered: Callable[[str], TaskList]) -> None:
    found = lowered(name)
    assert found.network == found.source == name and found.unsupported == ()
    assert len({task.hash for task in found.tasks}) == len(found.tasks) >= 5
    assert all(task.calls >= 1 for task in found.tasks)
    for task in found.tasks:
        nodes, root = load(task.tvm_json)
        assert list(prim_funcs(nodes, root)) == ["main"]
        assert not task.name.startswith(("reshape", "expand_dims", "squeeze"))


def test_networks_differ(lowered: Callable[[str], TaskList]) -> None:
    """Networks share some programs, and each has some of its own."""
    hashes = {name: {task.hash for task in lowered(name).tasks} for name in network_names()}
    for name, own in hashes.items():
        others = set().union(*(tasks for other, tasks in hashes.items() if other != name))
        assert own - others, name


def test_sparser_attention_and_fewer_second_experts_make_smaller_programs() -> None:
    from cdmpp.frontends.tasks import network_tasks

    sparse, dense = (network_tasks(f"dsv-attention:seq=128,block=32,density={d}") for d in (0.25, 1.0))
    assert [task.name for task in sparse.tasks] == [task.name for task in dense.tasks]
    differ = [a.name for a, b in zip(sparse.tasks, dense.tasks, strict=True) if a.hash != b.hash]
    assert sum("matmul" in name for name in differ) == 2 and any("softmax" in name for name in differ)
