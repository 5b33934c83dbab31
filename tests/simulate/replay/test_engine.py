"""The replay engine against hand-computed graphs, its bounds, and a slow simulation without a heap."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdmpp.errors import FieldError
from cdmpp.simulate.replay import Graph, Node, Replayer, engine, replay
from cdmpp.simulate.replay.graph import NodeKind, Order


def ends(graph: Graph) -> dict[str, tuple[float, float]]:
    result = replay(graph)
    return {
        node.id: (start, end)
        for node, start, end in zip(graph.nodes, result.start_s.tolist(), result.end_s.tolist(), strict=True)
    }


def test_forward_backward_and_overlapped_all_reduce() -> None:
    # Two layers; the first all-reduce hides behind b1, the second one does not.
    nodes = [
        Node("f1", "gpu", 1.0),
        Node("f2", "gpu", 2.0, ("f1",)),
        Node("b2", "gpu", 4.0, ("f2",)),
        Node("b1", "gpu", 2.0, ("b2",)),
        Node("r2", "gpu", 3.0, ("b2",), stream="comm", kind="comm"),
        Node("r1", "gpu", 1.5, ("b1",), stream="comm", kind="comm"),
        Node("u", "gpu", 0.5, ("r1", "r2")),
    ]
    result = replay(Graph(nodes))
    assert result.start_s.tolist() == [0.0, 1.0, 3.0, 7.0, 7.0, 10.0, 11.5]
    assert result.makespan_s == 12.0
    assert [nodes[i].id for i in result.critical_path] == ["f1", "f2", "b2", "r2", "r1", "u"]
    # b1 ends at 9; from there to 11.5 only transfers go on.
    assert result.exposed_comm_s == 2.5
    assert result.exposed_comm_by_device_s == {"gpu": 2.5}
    assert [(s.stream, s.busy_s, s.idle_s, s.nodes) for s in result.streams] == [
        ("0", 9.5, 2.5, 5),
        ("comm", 4.5, 7.5, 2),
    ]


def test_listed_order_lets_nothing_overtake() -> None:
    nodes = [Node("slow", "b", 5.0), Node("first", "a", 1.0, ("slow",)), Node("second", "a", 3.0)]
    assert ends(Graph(nodes))["second"] == (0.0, 3.0)
    assert ends(Graph(nodes, order="listed"))["second"] == (6.0, 9.0)


def test_a_graph_without_nodes_takes_no_time() -> None:
    result = replay(Graph([]))
    assert result.makespan_s == 0
    assert result.critical_path == []
    assert result.exposed_comm_s == 0


@pytest.mark.parametrize(
    ("nodes", "says", "path"),
    [
        ([Node("a", "g", 1), Node("a", "g", 2)], "nodes 0 and 1 are both called 'a'", "nodes.1.id"),
        ([Node("a", "g", 1), Node("b", "g", 2, ("a", "c"))], "'b' depends on 'c'", "nodes.1.deps.1"),
        ([Node("a", "g", 1), Node("b", "g", -2.0)], "duration_s is -2.0", "nodes.1.duration_s"),
        ([Node("a", "g", 1, gap_s=float("nan"))], "gap_s is nan", "nodes.0.gap_s"),
        ([Node("a", "g", 1, ("a",))], "a -> a", "nodes.0.deps"),
        (
            [
                Node("d", "g", 1, ("c",)),
                Node("c", "g", 1, ("a",)),
                Node("a", "g", 1, ("b",)),
                Node("b", "g", 1, ("c",)),
                Node("e", "g", 1),
            ],
            "3 nodes wait for each other: a -> c -> b -> a",
            "nodes.2.deps",
        ),
    ],
)
def test_invalid_graph_is_refused(nodes: list[Node], says: str, path: str) -> None:
    with pytest.raises(FieldError) as error:
        replay(Graph(nodes))
    assert says in error.value.message
    assert error.value.path == path


def test_a_list_that_contradicts_the_dependencies_is_refused() -> None:
    nodes = [Node("a", "g", 1, ("b",)), Node("b", "g", 1)]
    assert replay(Graph(nodes)).makespan_s == 2
    with pytest.raises(FieldError, match="in the order of the list"):
        replay(Graph(nodes, order="listed"))


KINDS: tuple[NodeKind, ...] = ("compute", "comm", "gap")


@st.composite
def graphs(draw: st.DrawFn, order: Order = "ready", streams: int = 3, parallel: bool = False) -> Graph:
    n = draw(st.integers(1, 9))
    names = draw(st.permutations([f"n{i}" for i in range(n)]))
    seconds = st.integers(0, 12).map(lambda x: x / 4)
    nodes = []
    for i in range(n):
        deps = draw(st.lists(st.sampled_from(names[:i]), unique=True, max_size=3)) if i else []
        first = draw(st.integers(0, streams - 1))
        also = draw(st.lists(st.integers(0, streams - 1), max_size=2, unique=True))
        nodes.append(
            Node(
                names[i],
                f"d{first}",
                draw(seconds),
                tuple(deps),
                "s",
                draw(st.sampled_from(KINDS)),
                draw(st.sampled_from([0.0, 0.0, 0.25])),
                tuple((f"d{k}", "s") for k in also if k != first),
            )
        )
    everywhere = frozenset(f"d{i}" for i in range(streams)) if parallel else frozenset()
    return Graph(nodes, everywhere, order)


def by_the_book(graph: Graph) -> dict[str, tuple[float, float]]:
    """The same rules without a heap: look through all nodes for the one that is served next."""
    nodes = {node.id: node for node in graph.nodes}
    done: dict[str, tuple[float, float]] = {}
    free: dict[tuple[str, str], float] = {}
    while len(done) < len(nodes):
        ready = {
            name: max((done[d][1] + nodes[d].gap_s for d in node.deps), default=0.0)
            for name, node in nodes.items()
            if name not in done and all(d in done for d in node.deps)
        }
        name = min(ready, key=lambda name: (ready[name], name))
        node = nodes[name]
        held = [] if node.device in graph.parallel else [(node.device, node.stream)]
        held += [stream for stream in node.also if stream[0] not in graph.parallel]
        start = max([ready[name], *(free.get(stream, 0.0) for stream in held)])
        done[name] = (start, start + node.duration_s)
        for stream in held:
            free[stream] = done[name][1] + node.gap_s
    return done


@settings(max_examples=60)
@given(st.one_of(graphs(), graphs(parallel=True)))
def test_equal_to_the_rules_taken_literally(graph: Graph) -> None:
    assert ends(graph) == by_the_book(graph)


def one_queue() -> st.SearchStrategy[Graph]:
    """Graphs on one stream, without gaps."""
    return graphs(streams=1).map(lambda graph: Graph([Node(n.id, n.device, n.duration_s, n.deps) for n in graph.nodes]))


@settings(max_examples=25)
@given(graphs(parallel=True))
def test_parallel_devices_take_the_longest_path(graph: Graph) -> None:
    longest: dict[str, float] = {}
    nodes = {node.id: node for node in graph.nodes}

    def end(name: str) -> float:
        if name not in longest:
            node = nodes[name]
            longest[name] = node.duration_s + max((end(d) + nodes[d].gap_s for d in node.deps), default=0.0)
        return longest[name]

    assert replay(graph).makespan_s == max(map(end, nodes))
    assert Replayer(Graph(graph.nodes)).longest_path_s == max(map(end, nodes))


@settings(max_examples=25)
@given(graphs(), st.randoms(use_true_random=False))
def test_the_order_of_the_nodes_does_not_matter(graph: Graph, random: object) -> None:
    shuffled = list(graph.nodes)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    other = Graph(shuffled)
    assert ends(graph) == ends(other)
    a, b = replay(graph), replay(other)
    assert [graph.nodes[i].id for i in a.critical_path] == [shuffled[i].id for i in b.critical_path]
    assert a.streams == b.streams
    assert a.exposed_comm_s == b.exposed_comm_s


@settings(max_examples=25)
@given(st.one_of(graphs(order="listed"), graphs(parallel=True), one_queue()), st.integers(0, 8))
def test_a_longer_node_never_shortens_the_whole(graph: Graph, which: int) -> None:
    replayer = Replayer(graph)
    longer = np.array([node.duration_s for node in graph.nodes])
    before = replayer.run().makespan_s
    longer[which % len(longer)] += 1.0
    assert replayer.run(longer).makespan_s >= before


def test_with_queues_by_readiness_it_can_as_graham_showed() -> None:
    # The longer x lets b go first on g, and the long chain behind b starts earlier.
    def graph(x: float) -> Graph:
        return Graph(
            [
                Node("x", "f", x),
                Node("a", "g", 4.0, ("x",)),
                Node("y", "h", 2.0),
                Node("b", "g", 1.0, ("y",)),
                Node("c", "h", 6.0, ("b",)),
            ]
        )

    assert replay(graph(1.0)).makespan_s == 12.0
    assert replay(graph(2.5)).makespan_s == 9.0


@settings(max_examples=40)
@given(graphs())
def test_bounds_path_and_streams_agree_with_the_timeline(graph: Graph) -> None:
    replayer = Replayer(graph)
    result = replayer.run()
    makespan = result.makespan_s
    assert max(replayer.longest_path_s, replayer.busiest_stream_s) <= makespan + 1e-12
    path = result.critical_path
    assert result.start_s[path[0]] == 0
    assert result.end_s[path[-1]] == makespan
    for before, after in itertools.pairwise(path):
        assert result.start_s[after] == result.end_s[before] + graph.nodes[before].gap_s
    assert all(abs(use.busy_s + use.idle_s - makespan) < 1e-12 for use in result.streams)
    comm = sum(node.duration_s for node in graph.nodes if node.kind == "comm")
    assert 0 <= result.exposed_comm_s <= comm


@settings(max_examples=15)
@given(graphs())
def test_many_replays_are_single_ones(graph: Graph) -> None:
    replayer = Replayer(graph)
    own = np.array([node.duration_s for node in graph.nodes])
    durations = np.stack([own, own * 2, own + 0.5])
    assert replayer.makespans(durations).tolist() == [replayer.run(row).makespan_s for row in durations]


@settings(max_examples=15)
@given(graphs())
def test_compiled_and_plain_are_equal(graph: Graph) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "COMPILED", False)
        patch.setattr(engine, "walk", getattr(engine.walk, "py_func", engine.walk))
        plain = replay(graph)
    result = replay(graph)
    assert result.start_s.tolist() == plain.start_s.tolist()
    assert result.end_s.tolist() == plain.end_s.tolist()
    assert result.cause.tolist() == plain.cause.tolist()
