"""InfinitePOD: a ring all-reduce that skips broken nodes over k-hop links. (Shou et al., SIGCOMM 2025)

Nodes form a line. Each has optical links to its next k neighbours. The ring skips broken nodes by longer links,
unless k neighbours in a row are broken. Every message of the all-reduce is a node of the graph, so a slow long link
delays each of the 2 (p - 1) rounds.

    python docs/examples/infinitepod.py
"""

from __future__ import annotations

from cdmpp.simulate.replay import Graph, Link, Node, collective_s, replay

#: Assumptions of this example: a hop costs 1 microsecond more, and reconfigured links keep their rate.
ALPHA_S, HOP_S, BYTES_PER_S = 5e-6, 1e-6, 5e10


def ring(nodes: int, broken: set[int], k: int) -> list[tuple[int, int]]:
    """Working nodes in order, each with the number of hops to the next one in the ring.

    Raises
    ------
    ValueError
        A gap of broken nodes is longer than the longest link.
    """
    working = [n for n in range(nodes) if n not in broken]
    hops = [(b - a) % nodes for a, b in zip(working, [*working[1:], working[0]], strict=True)]
    if max(hops) > k:
        raise ValueError(f"a gap of {max(hops)} nodes needs links over {max(hops)} hops; the longest link has {k}")
    return list(zip(working, hops, strict=True))


def all_reduce_s(members: list[tuple[int, int]], size: float) -> float:
    """Seconds of a ring all-reduce of ``size`` bytes, message by message."""
    p = len(members)
    nodes = []
    for turn in range(2 * (p - 1)):
        for i, (node, hops) in enumerate(members):
            link = Link(ALPHA_S + (hops - 1) * HOP_S, 1 / BYTES_PER_S)
            # A node sends what it received in the previous round.
            deps = (f"{turn - 1}: {members[i - 1][0]}",) if turn else ()
            nodes.append(Node(f"{turn}: {node}", f"link of {node}", link.seconds(size / p), deps, kind="comm"))
    return replay(Graph(nodes)).makespan_s


def main() -> dict[str, float]:
    """Print and return the seconds of a 64 MB all-reduce over 32 nodes, without and with broken nodes."""
    size, seconds = 64e6, {}
    cases = {"none broken": set(), "one broken": {7}, "two apart": {7, 20}, "two neighbours": {7, 8}}
    for name, broken in cases.items():
        members = ring(32, broken, k=3)
        seconds[name] = all_reduce_s(members, size)
        even = collective_s("all_reduce", len(members), size, Link(ALPHA_S, 1 / BYTES_PER_S))
        longest = max(hops for _, hops in members)
        print(
            f"{name:15} {len(members)} nodes, longest link {longest} hops: {1e3 * seconds[name]:.3f} ms "
            f"({100 * (seconds[name] / even - 1):.1f} % more than a ring of equal links)"
        )
    return seconds


if __name__ == "__main__":
    main()
