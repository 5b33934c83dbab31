"""When a proposal is started: bounded, at most one for each model and device, from enough observations."""

from cdmpp.devices import lookup
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp_server.drift import MIN_OBSERVATIONS, DriftWatch
from cdmpp_server.jobs.store import JobStore
from cdmpp_server.models import Models
from cdmpp_server.observe.figures import RECENT
from cdmpp_server.observe.ids import PredictedBefore
from cdmpp_server.observe.store import Observation, ObservationStore
from cdmpp_server.proposals import MAX_KEPT, Key, ProposalStore

DIGEST = lookup("t4").digest()


def watch_of(store: ObservationStore, predictor: LatencyPredictor, max_jobs: int = 10) -> DriftWatch:
    jobs = JobStore(store, max_jobs, 10, 10, 60.0)
    return DriftWatch(store, ProposalStore(store), jobs, Models(predictor, 1), lambda: None)


def observe(store: ObservationStore, model: str, count: int, ratio: float, device: str = "t4") -> None:
    predicted = PredictedBefore("0" * 32, device, DIGEST, "library", "kernel", None, model, 1e-3, 0.9e-3, 1.1e-3)
    store.add([Observation(predicted, 1e-3 * ratio)] * count)


def test_one_job_is_submitted_for_a_drift(store: ObservationStore, predictor: LatencyPredictor) -> None:
    watch = watch_of(store, predictor)
    observe(store, predictor.model_id, 300, 1.0)
    assert watch.check() == 0
    observe(store, predictor.model_id, MIN_OBSERVATIONS - 1, 1.5)
    assert watch.check() == 0, "a job was submitted from too few observations since the change"
    observe(store, predictor.model_id, 1, 1.5)
    assert watch.check() == 1
    assert watch.check() == 0
    # Other workers see the same database, and further observations are of the same drift.
    observe(store, predictor.model_id, RECENT - 1, 1.5)
    assert watch_of(store, predictor).check() == 0
    observe(store, predictor.model_id, 1, 1.5)
    assert [watch.check(), watch_of(store, predictor).check()] == [1, 0], "an old proposal is replaced once"
    (key,) = ProposalStore(store).jobs()
    assert key == Key("t4", DIGEST, predictor.model_id)


def test_no_job_for_other_models_and_devices_that_cannot_be_found_again(
    store: ObservationStore, predictor: LatencyPredictor
) -> None:
    observe(store, "an older model", 200, 3.0)
    observe(store, predictor.model_id, 200, 3.0, "my own")
    observe(store, predictor.model_id, 200, 3.0, "l4")  # the figures are not those of the L4
    assert watch_of(store, predictor).check() == 0


def test_full_queue_leaves_the_proposal_to_a_later_check(store: ObservationStore, predictor: LatencyPredictor) -> None:
    full = watch_of(store, predictor, max_jobs=0)
    observe(store, predictor.model_id, 200, 3.0)
    assert full.check() == 0
    assert watch_of(store, predictor).check() == 1


def test_proposals_are_bounded(store: ObservationStore) -> None:
    proposals = ProposalStore(store)
    for number in range(MAX_KEPT + 20):
        id = proposals.claim(Key("t4", DIGEST, f"model {number}"), 1)
        assert id is not None
        proposals.submitted(id, f"{number:032x}")
    assert len(proposals.jobs()) == MAX_KEPT
    proposals.finish(id, "base", "{}", b"")
    proposals.take(f"{number:032x}")
    taken = proposals.taken()
    assert taken is not None and taken.job_id == f"{number:032x}"
    assert proposals.claim(Key("t4", DIGEST, f"model {number}"), 10_000) is None, "a taken proposal stays"
