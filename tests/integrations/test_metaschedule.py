"""The cost model: the order of its scores, what it learns, what it keeps, who predicts."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import ArtifactError, DataError, InvalidDeviceError
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.programs.program import TensorProgram
from tests.client.conftest import Serve, serve
from tests.integrations.conftest import Draw, Simple

pytest.importorskip("tvm")

from tvm.s_tir import meta_schedule as ms

from cdmpp.integrations.metaschedule import CdmppCostModel

__all__ = ["serve"]  # a fixture

pytestmark = [pytest.mark.slow, pytest.mark.tvm]


def model(predictor: Any, device: DeviceSpec, update: str = "frozen", explore: float = 0.0) -> Any:
    return CdmppCostModel(predictor, device=device, update=update, explore=explore)


def results(seconds: list[float | None]) -> list[Any]:
    return [ms.runner.RunnerResult(None, "crash") if s is None else ms.runner.RunnerResult([s], None) for s in seconds]


def test_a_score_is_higher_where_the_predicted_latency_is_lower(
    tvm: Any, draw: Draw, predictor: LatencyPredictor, device: DeviceSpec
) -> None:
    context, candidates = draw(12)
    scores = model(predictor, device).predict(context, candidates)
    texts = [str(tvm.ir.save_json(c.sch.mod["main"])) for c in candidates]
    said = predictor.predict([TensorProgram.from_tvm_json(t) for t in texts], device)
    latencies = np.array([p.latency_s for p in said], dtype=float)
    assert scores.dtype == np.float64 and scores.max() == pytest.approx(1.0)
    # The same figures that every other door gives, in another unit.
    np.testing.assert_allclose(scores, latencies.min() / latencies, rtol=1e-9)


def test_scores_of_a_task_have_one_unit(draw: Draw, device: DeviceSpec) -> None:
    made = model(Simple(), device)
    context, candidates = draw(12)
    whole = made.predict(context, candidates)
    again = np.concatenate([made.predict(context, candidates[:5]), made.predict(context, candidates[5:])])
    np.testing.assert_allclose(again, whole)


def test_no_candidates_no_scores(draw: Draw, device: DeviceSpec) -> None:
    context, _ = draw(1)
    # TVM hands a null pointer over for no scores at all, so its own search never asks.
    assert model(Simple(), device)._inst.predict(context, []).shape == (0,)


def test_a_candidate_that_cannot_be_encoded_comes_last(
    tvm: Any, draw: Draw, device: DeviceSpec, caplog: pytest.LogCaptureFixture
) -> None:
    from tvm.s_tir import Schedule

    context, candidates = draw(3)
    both = tvm.IRModule({"main": candidates[0].sch.mod["main"], "other": candidates[1].sch.mod["main"]})
    broken = ms.MeasureCandidate(Schedule(both), [])
    made = model(Simple(), device)
    with caplog.at_level(logging.WARNING):
        scores = made.predict(context, [candidates[0], broken, candidates[2]])
    assert scores[1] == 0.0 and (scores[[0, 2]] > 0).all()
    assert made.unencoded == 1 and "2 PrimFuncs" in caplog.text
    # Nothing is learned from it either, and the others are.
    tuned = model(Simple(), device, "fine-tune")
    tuned.update(context, [broken, candidates[0]], results([1e-3, 1e-3]))
    assert tuned.predict(context, [broken])[0] == 0.0


def test_frozen_stays_as_it_is(draw: Draw, device: DeviceSpec) -> None:
    context, candidates = draw(8)
    made = model(Simple(), device)
    before = made.predict(context, candidates)
    made.update(context, candidates, results([1e-3 * (i + 1) for i in range(len(candidates))]))
    np.testing.assert_array_equal(made.predict(context, candidates), before)


def test_fine_tuned_follows_what_was_measured(draw: Draw, device: DeviceSpec) -> None:
    context, candidates = draw(40)
    simple = Simple()
    made = model(simple, device, "fine-tune")
    base = made.predict(context, candidates)
    # The machine disagrees with the model: programs are as slow as the model finds them fast.
    seconds = (1e-5 * (base / base.min()) ** 2).tolist()
    made.update(context, candidates[:32], results(seconds[:32]))
    after = made.predict(context, candidates)
    unseen = np.corrcoef(np.log(after[32:]), np.log(seconds[32:]))[0, 1]
    assert np.corrcoef(np.log(base[32:]), np.log(seconds[32:]))[0, 1] > 0.99
    assert unseen < 0.5, "the order of programs that were not measured has to follow the measured ones"
    assert np.corrcoef(np.log(after[:32]), np.log(seconds[:32]))[0, 1] < 0


def test_each_distinct_program_is_predicted_once(draw: Draw, device: DeviceSpec) -> None:
    simple = Simple()
    made = model(simple, device, "fine-tune")
    context, candidates = draw(12)
    first = made.predict(context, [*candidates[:8], *candidates[:4]])
    made.update(context, candidates[:4], results([1e-5, 2e-5, 3e-5, None]))
    made.predict(context, candidates)
    assert [len(queries) for queries in simple.asked] == [8, 4]
    np.testing.assert_array_equal(first[:4], first[8:])


def test_exploring_prefers_programs_unlike_the_measured_ones(draw: Draw, device: DeviceSpec) -> None:
    context, candidates = draw(40)
    scores = {}
    for explore in (0.0, 2.0):
        made = model(Simple(), device, "fine-tune", explore)
        base = made.predict(context, candidates)
        made.update(context, candidates[:20], results((1e-5 / base[:20]).tolist()))
        scores[explore] = made.predict(context, candidates)
    gain = scores[2.0] / scores[0.0]
    assert np.median(gain[20:]) > np.median(gain[:20])


def test_a_failed_run_is_learned_as_slow(draw: Draw, device: DeviceSpec) -> None:
    context, candidates = draw(24)
    made = model(Simple(), device, "fine-tune")
    base = made.predict(context, candidates)
    fails = base >= np.median(base)
    made.update(context, candidates, results([None if f else 1e-5 for f in fails.tolist()]))
    after = made.predict(context, candidates)
    assert after[fails].mean() / after[~fails].mean() < base[fails].mean() / base[~fails].mean()
    # All of a round may fail.
    alone = model(Simple(), device, "fine-tune")
    alone.update(context, candidates, results([None] * len(candidates)))
    assert np.isfinite(alone.predict(context, candidates)).all()


def test_what_was_learned_is_kept(draw: Draw, device: DeviceSpec, tmp_path: Path) -> None:
    context, candidates = draw(20)
    made = model(Simple(), device, "fine-tune")
    made.predict(context, candidates)
    made.update(context, candidates[:10], results([1e-5 * (i + 1) for i in range(10)]))
    path = str(tmp_path / "learned.safetensors")
    made.save(path)
    other = model(Simple(), device, "fine-tune")
    other.load(path)
    np.testing.assert_allclose(other.predict(context, candidates), made.predict(context, candidates))
    # It goes on from there.
    for each in (made, other):
        each.update(context, candidates[10:], results([1e-5] * (len(candidates) - 10)))
    np.testing.assert_allclose(other.predict(context, candidates), made.predict(context, candidates))


def test_files_of_another_model_and_damaged_ones_are_refused(draw: Draw, device: DeviceSpec, tmp_path: Path) -> None:
    path = tmp_path / "learned.safetensors"
    model(Simple(), device).save(str(path))
    other = Simple()
    other.model_id = "another"
    with pytest.raises(ArtifactError, match="another"):
        model(other, device)._inst.load(str(path))
    # TVM's own call keeps the message and loses the class.
    with pytest.raises(RuntimeError, match="another"):
        model(other, device).load(str(path))
    path.write_bytes(path.read_bytes()[:-3])
    for damaged in (path, tmp_path / "absent"):
        with pytest.raises(ArtifactError):
            model(Simple(), device)._inst.load(str(damaged))


def test_settings_that_make_no_sense_are_refused(device: DeviceSpec) -> None:
    with pytest.raises(DataError, match="thaw"):
        model(Simple(), device, "thaw")
    with pytest.raises(DataError, match="int"):
        model(3, device)
    for update, explore, problem in (("fine-tune", -1.0, "-1.0"), ("frozen", 0.5, "0.5 needs measurements")):
        with pytest.raises(DataError, match=problem):
            model(Simple(), device, update, explore)
    with pytest.raises(ArtifactError):
        model("no/such/folder", device)


def test_a_gpu_has_to_be_named(tvm: Any, draw: Draw) -> None:
    from types import SimpleNamespace

    context, candidates = draw(2)
    elsewhere = SimpleNamespace(mod=context.mod, target=tvm.target.Target({"kind": "cuda", "arch": "sm_80"}))
    made = CdmppCostModel(Simple())._inst
    with pytest.raises(InvalidDeviceError, match="device="):
        made.predict(elsewhere, candidates)


def test_by_default_programs_run_here(draw: Draw) -> None:
    simple = Simple()
    context, candidates = draw(2)
    try:
        CdmppCostModel(simple)._inst.predict(context, candidates)
    except InvalidDeviceError as error:
        pytest.skip(f"this CPU cannot be described: {error.message}")
    (spec,) = simple.asked[0].devices
    assert isinstance(spec, DeviceSpec) and spec.kind == "cpu" and spec.compute_units == 1
    assert spec.name.endswith("-1t-sse42")


def test_a_search_reports_its_tasks_and_its_counts(draw: Draw, predictor: LatencyPredictor, device: DeviceSpec) -> None:
    lines: list[str] = []
    context, candidates = draw(4)
    cost_model = CdmppCostModel(predictor, device=device, report=lines.append)
    cost_model.predict(context, candidates)
    cost_model.predict(context, candidates)  # within ten seconds of the first line
    assert lines == [f"cdmpp: model {predictor.model_id} ranks the candidates of a new task for {device.name}"]


def test_a_search_reports_on_stderr_by_default(
    draw: Draw, predictor: LatencyPredictor, device: DeviceSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    context, candidates = draw(2)
    model(predictor, device).predict(context, candidates)
    printed = capsys.readouterr()
    assert "ranks the candidates of a new task" in printed.err
    assert printed.out == ""


def test_a_server_gives_the_scores_of_the_model_in_this_process(
    draw: Draw, predictor: LatencyPredictor, device: DeviceSpec, serve: Serve
) -> None:
    context, candidates = draw(40)
    remote, local = (model(source, device, "fine-tune") for source in (serve(deadline_s=60), predictor))
    np.testing.assert_array_equal(remote.predict(context, candidates), local.predict(context, candidates))
    assert remote.model_id == predictor.model_id
    # What is learned from runs is learned on this side.
    for made in (remote, local):
        made.update(context, candidates[:16], results([1e-6 * (1 + i % 7) for i in range(16)]))
    np.testing.assert_array_equal(remote.predict(context, candidates), local.predict(context, candidates))
    remote.close()
    local.close()  # nothing to end
