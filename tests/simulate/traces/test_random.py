"""Random CUDA traces: every node starts when it was measured, and faster work never takes longer."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from cdmpp.simulate.traces import replay_trace
from tests.seeds import seeds
from tests.simulate.traces.kineto import HOST, KinetoTrace

NAMES = ("gemm", "relu", "ncclDevKernel_AllReduce_Sum_f32_RING_LL")
SYNCS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize")


class RandomTrace:
    """A host thread that launches on three streams, synchronises, and waits for a second thread."""

    def __init__(self, seed: int) -> None:
        self.random, self.trace = random.Random(seed), KinetoTrace()
        self.at, self.free = 0.0, {7: 0.0}

    def make(self) -> KinetoTrace:
        """Two iterations."""
        for number in range(2):
            begin = self.at
            self.kernel()
            for _ in range(self.random.randint(1, 20)):
                self.at += self.random.choice([0, 1, 5, 60]) * self.random.random()
                self.random.choice(
                    [self.kernel, self.kernel, self.kernel, self.synchronise, self.view, self.backward]
                )()
            self.trace.step(number, begin, self.at - begin + 0.5)
            self.at += 1
        return self.trace

    def kernel(self) -> None:
        stream, length = self.random.choice([7, 7, 20, 21]), self.random.choice([2, 10, 100]) * self.random.random()
        at = max(self.free.get(stream, 0) + self.random.choice([0, 1, 3]), self.at + 3 + self.random.random() * 5)
        if self.random.random() < 0.2:  # after all other streams
            at = max(at, max(self.free.values()) + 1)
        call_us = self.random.choice([2, 5, 30])
        number = self.trace.launch(self.random.choice(NAMES), self.at + 1, at, length, stream, call_us=call_us)
        at += length
        for _ in range(3 if self.random.random() < 0.15 else 0):  # a captured graph: several kernels of one launch
            self.trace.add("kernel", "in_graph", at + 1, 4, 0, stream, device=0, stream=stream, correlation=number)
            at += 5
        self.free[stream] = at
        self.trace.op("aten::mm", self.at, 32, [[4, 4], [4, 4]], ["float", "float"])
        self.at += 33

    def synchronise(self) -> None:
        end = max(self.at, *self.free.values()) + 2
        self.trace.runtime(self.random.choice(SYNCS), self.at, end - self.at)
        self.at = end

    def view(self) -> None:
        self.trace.op("aten::view", self.at, 3)
        self.at += 3

    def backward(self) -> None:
        """A second thread works while the first one pauses."""
        at = self.at + self.random.random() * 20
        for _ in range(self.random.randint(1, 4)):
            self.trace.add("cpu_op", "MmBackward0", at, 10, HOST, 99)
            at += 10 + self.random.random() * 5
        self.at = at + self.random.random() * 10


@pytest.mark.parametrize("seed", seeds(40))
def test_nodes_start_when_they_were_measured(tmp_path: Path, seed: int) -> None:
    path = RandomTrace(seed).make().write(tmp_path / "trace.json")
    for iteration in (None, 1):
        answer = replay_trace(path, iteration=iteration, speed_up=[(".", 2.0)], remove=["aten::mm"])
        for node, start_s in zip(answer.graph.nodes, answer.timeline.start_s.tolist(), strict=True):
            assert start_s == pytest.approx(node.start_s, abs=2e-9)
        assert answer.replayed_s == pytest.approx(answer.measured_s, abs=2e-9)
        (row,) = answer.idle
        total_s = row.busy_s + sum(row.idle_s.values())
        assert total_s * answer.graph.count == pytest.approx(answer.timeline.makespan_s)
        assert all(change.saving_s > -1e-12 for change in answer.what_if)
