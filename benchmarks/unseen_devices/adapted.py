"""Error after some measurements: ``cdmpp adapt --k`` on one device and source."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.unseen_devices.figures import Array, figures
from cdmpp.model.artifact.model import Artifact
from cdmpp.train.adaptation.adapt import adapt, answers_after
from cdmpp.train.adaptation.records import DeviceRecords
from cdmpp.train.adaptation.survey import Survey
from cdmpp.train.evaluation.cache import FeatureCache


def adapted(
    artifact: Artifact,
    records: DeviceRecords,
    known: Survey,
    log_measured: Array,
    family: Array,
    cache: FeatureCache,
    *,
    sampler: str,
    k: int,
    seed: int,
) -> dict[str, Any]:
    """One entry of "adapted" in the results file: before and after on the rows that were not chosen.

    Parameters
    ----------
    known : Survey
        Of the records by the model.
    log_measured, family : per row of the survey
    """
    made = adapt(artifact, records, k=k, sampler=sampler, seed=seed, cache=cache, known=known)
    rest = ~np.isin(records.origin[known.rows], made.report["selected"])
    query = known.query[rest]
    after = [column[query] for column in answers_after(made.artifact, known)]
    before = [column[query] for column in (known.point, known.levels, known.factor)]
    adapter = made.artifact.adapter
    assert adapter is not None
    return {
        "k": k,
        "sampler": sampler,
        "seed": seed,
        "before": figures(log_measured[rest], before[0], family[rest], *before[1:]),
        "after": figures(log_measured[rest], after[0], family[rest], *after[1:]),
        "weight": adapter.weight,
        "width": round(adapter.width, 4),
    }
