"""Builder and runner: each program once, whoever proposes it; failures; going on with a folder."""

from pathlib import Path
from typing import Any

import pytest

from cdmpp.data.measure.settings import CollectSettings
from cdmpp.data.measure.targets import Configuration
from cdmpp.errors import DataError, InvalidDeviceError
from tests.integrations.conftest import TARGET, Draw, Simple

pytest.importorskip("tvm")

from tvm.s_tir import meta_schedule as ms

from cdmpp.integrations.measuring import Workbench
from cdmpp.integrations.metaschedule import CdmppCostModel

pytestmark = [pytest.mark.tvm, pytest.mark.native, pytest.mark.slow]


def inputs(tvm: Any, candidates: list[Any]) -> list[Any]:
    target = tvm.target.Target(TARGET)
    return [ms.builder.BuilderInput(c.sch.mod, target) for c in candidates]


def measure(bench: Any, built: list[Any]) -> list[float]:
    """Seconds of what was built."""
    runs = [ms.runner.RunnerInput(b.artifact_path, "cpu", []) for b in built]
    return [float(future.result().run_secs[0]) for future in bench.runner.run(runs)]


def small() -> Any:
    """A search of a few candidates."""
    return ms.search_strategy.EvolutionarySearch(population_size=16, genetic_num_iters=1, init_min_unmeasured=4)


def test_a_program_is_measured_once(
    tvm: Any, draw: Draw, configuration: Configuration, quick: CollectSettings, tmp_path: Path
) -> None:
    _, candidates = draw(3)
    twice = [candidates[0], candidates[1], candidates[0]]
    with Workbench(tmp_path / "trials", configuration, quick) as bench:
        built = list(bench.builder.build(inputs(tvm, twice)))
        assert len({b.artifact_path for b in built}) == 3
        first = measure(bench, built)
        assert first[0] == first[2] > 0 and len(bench) == 2
        for b in built:  # what the tuner does with what it has run
            tvm.get_global_func("s_tir.meta_schedule.remove_build_dir")(b.artifact_path)
        assert bench.trial(bench.asked[0]).cost_s > 0
    # Another search, after a restart: nothing is built.
    with Workbench(tmp_path / "trials", configuration, quick) as bench:
        built = list(bench.builder.build(inputs(tvm, candidates[:2])))
        assert not any(Path(b.artifact_path).exists() for b in built)
        assert measure(bench, built) == first[:2]


def test_a_program_that_cannot_be_built_says_so(
    tvm: Any, draw: Draw, configuration: Configuration, quick: CollectSettings, tmp_path: Path
) -> None:
    _, candidates = draw(2)
    rules = CollectSettings(timing=quick.timing, builders=1, build_limit_s=60.0)
    with Workbench(tmp_path / "trials", configuration, rules) as bench:
        bad = tvm.target.Target({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a72"})
        given = inputs(tvm, candidates)
        given[0] = ms.builder.BuilderInput(candidates[0].sch.mod, bad)
        built = list(bench.builder.build(given))
        failed = [b for b in built if b.error_msg is not None]
        fine = [b for b in built if b.error_msg is None]
        if not failed:
            pytest.skip("a cross compiler for aarch64 is installed")
        assert len(failed) == 1 and str(failed[0].error_msg).startswith("build: ")
        assert measure(bench, fine)[0] > 0
        trial = bench.trial(bench.asked[0])
        assert trial.latency_s is None and trial.failure


def test_a_folder_is_timed_in_one_way(configuration: Configuration, quick: CollectSettings, tmp_path: Path) -> None:
    with Workbench(tmp_path / "trials", configuration, quick):
        pass
    with (
        pytest.raises(DataError, match="statistic"),
        Workbench(tmp_path / "trials", configuration, quick, statistic="least"),
    ):
        pass


@pytest.mark.parametrize("update", ["frozen", "fine-tune"])
def test_tune_tir(
    tvm: Any, function: Any, configuration: Configuration, quick: CollectSettings, tmp_path: Path, update: Any
) -> None:
    simple = Simple()
    with Workbench(tmp_path / "trials", configuration, quick) as bench:
        database = ms.tune_tir(
            tvm.IRModule({"main": function}),
            tvm.target.Target(TARGET),
            str(tmp_path / "work"),
            8,
            num_trials_per_iter=4,
            builder=bench.builder,
            runner=bench.runner,
            database="memory",
            cost_model=CdmppCostModel(simple, device=configuration.device, update=update),
            strategy=small(),
            num_tuning_cores=1,
            seed=1,
        )
        assert len(bench.asked) == 8
        measured = [bench.trial(d).latency_s for d in bench.asked]
    assert len(database) == 8 and all(s is not None and s > 0 for s in measured)
    assert sum(len(q) for q in simple.asked) >= 32
    best = min(float(r.run_secs[0]) for r in database.get_all_tuning_records())
    assert best == min(s for s in measured if s is not None)


def test_tune_relax(tvm: Any, configuration: Configuration, quick: CollectSettings, tmp_path: Path) -> None:
    from tvm import relax

    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((16, 32), "float32"))
    w = relax.Var("w", relax.TensorType((32, 24), "float32"))
    with builder.function("main", [x, w]):
        with builder.dataflow():
            found = builder.emit(relax.op.matmul(x, w))
            result = builder.emit_output(relax.op.nn.relu(found))
        builder.emit_func_output(result)
    module = relax.transform.LegalizeOps()(builder.get())
    simple = Simple()
    with Workbench(tmp_path / "trials", configuration, quick) as bench:
        database = ms.relax_integration.tune_relax(
            module,
            {},
            tvm.target.Target(TARGET),
            str(tmp_path / "work"),
            8,
            num_trials_per_iter=4,
            builder=bench.builder,
            runner=bench.runner,
            database="memory",
            cost_model=CdmppCostModel(simple, device=configuration.device, update="fine-tune"),
            strategy=small(),
            seed=1,
        )
        assert 4 <= len(bench.asked) <= 16  # two tasks, one of which has a single program
    assert len(database) == len(bench.asked) and simple.asked


def test_the_example_of_the_documentation(
    tvm: Any, function: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (Path(__file__).parents[2] / "docs" / "tuning.md").read_text(encoding="utf-8")
    code = text.split("```python\n")[1].split("```")[0]
    search = "32, num_trials_per_iter=16"
    assert search in code
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"module": tvm.IRModule({"main": function}), "small": small()}
    try:
        exec(code.replace(search, "4, num_trials_per_iter=4, strategy=small"), names)
    except InvalidDeviceError as error:
        pytest.skip(f"this CPU cannot be described: {error.message}")
    assert len(names["database"]) == 4
