"""A small task, candidates of it, and predictors that need no network."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cdmpp.data.measure.sampling import prepare_sampler, tune_context
from cdmpp.data.measure.settings import CollectSettings
from cdmpp.data.measure.targets import Configuration
from cdmpp.data.measure.timing import TimingSettings
from cdmpp.devices.spec import DeviceSpec
from cdmpp.features.schema import COLUMN
from cdmpp.predict.bulk import FeatureAnswers, FeatureQueries

TARGET = {"kind": "llvm", "mcpu": "x86-64-v2", "num-cores": 1}
Draw = Callable[..., tuple[Any, list[Any]]]


class Simple:
    """Predicts from one column: programs with more memory traffic are slower."""

    model_id = "simple"

    def __init__(self) -> None:
        self.asked: list[FeatureQueries] = []

    def predict_features(self, queries: FeatureQueries) -> FeatureAnswers:
        """One microsecond, and some for each unit of traffic."""
        self.asked.append(queries)
        traffic = queries.leaves[:, :, COLUMN["leaf_bytes"] :].sum(axis=(1, 2))
        seconds = 1e-6 * (1 + np.abs(traffic).astype(np.float64))
        return FeatureAnswers(
            seconds,
            0.9 * seconds,
            1.1 * seconds,
            np.stack([seconds, seconds], axis=1),
            np.zeros(len(seconds), dtype=np.int8),
            np.zeros(len(seconds)),
            seconds,
            (0.1, 0.9),
            self.model_id,
        )


@pytest.fixture(scope="session")
def tvm() -> Any:
    """TVM, ready for design spaces without the CUDA intrinsics, which take half a minute to import."""
    found = pytest.importorskip("tvm")
    prepare_sampler("llvm")
    return found


@pytest.fixture(scope="session")
def function(tvm: Any) -> Any:
    """A small matrix product, unscheduled."""
    from tvm import te, topi

    a, b = te.placeholder((32, 64), name="a"), te.placeholder((64, 48), name="b")
    return te.create_prim_func([a, b, topi.nn.matmul(a, b)]).with_attr("global_symbol", "main")


@pytest.fixture
def draw(tvm: Any, function: Any) -> Draw:
    """A tuning context, and random candidates of it."""

    def drawn(count: int, seed: int = 1) -> tuple[Any, list[Any]]:
        context, spaces = tune_context(str(tvm.ir.save_json(function)), TARGET, seed)
        strategy = context.search_strategy
        strategy.pre_tuning(max_trials=count, num_trials_per_iter=count, design_spaces=spaces)
        return context, list(strategy.generate_measure_candidates())

    return drawn


@pytest.fixture(scope="session")
def device() -> DeviceSpec:
    """Some CPU."""
    return DeviceSpec(
        name="test-cpu-1t",
        vendor="Intel",
        arch="x86-64",
        kind="cpu",
        compute_units=1,
        cores_per_unit=8,
        clock_hz=3e9,
        peak_flops_fp32=4.8e10,
        mem_bandwidth_bytes_per_s=1e10,
    )


@pytest.fixture
def configuration(device: DeviceSpec) -> Configuration:
    """One thread of it, on a core of this machine."""
    import os

    return Configuration(TARGET, 1, (max(os.sched_getaffinity(0)),), device)


@pytest.fixture
def quick(tmp_path: Path) -> CollectSettings:
    """Settings under which a program is timed within milliseconds, and one worker builds."""
    timing = TimingSettings(repeat_s=1e-4, total_s=1e-3, min_repeats=2, max_repeats=3, max_spread=100.0)
    return CollectSettings(timing=timing, builders=1)


@pytest.fixture(autouse=True)
def _quiet_tuner() -> Iterator[None]:
    """TVM's tuner leaves handlers with open files behind, and a logger to which pytest adds one of its own,
    without a name, on which the tuner's next call fails."""
    yield
    for name, found in list(logging.root.manager.loggerDict.items()):
        if name.startswith("tvm.s_tir.meta_schedule") and isinstance(found, logging.Logger):
            found.propagate = True
            for handler in list(found.handlers):
                found.removeHandler(handler)
                handler.close()
