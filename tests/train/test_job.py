"""A prepared training: its files, and its steps on a GPU."""

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch

from cdmpp.errors import DataError
from cdmpp.train.fit import job_of
from cdmpp.train.job import TrainingJob
from tests.train.rank_scenarios import run, scenario

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["ranking", "domain"])
def test_files_hold_what_is_trained_on(name: str, tmp_path: Path) -> None:
    data, config = scenario(name)
    job = job_of(data, config)
    job.write(tmp_path)
    read = TrainingJob.read(tmp_path)
    assert (read.network, read.optimiser, read.domain, read.seed) == (job.network, job.optimiser, job.domain, job.seed)
    assert read.identity == job.identity
    assert np.array_equal(read.device_matrix, job.device_matrix, equal_nan=True)
    used = np.union1d(job.index, job.target)
    assert np.array_equal(used[read.index], job.index) and np.array_equal(read.weight, job.weight)
    assert np.array_equal(used[read.target], job.target)
    for name in ("device", "backend", "protocol", "framework", "log_latency"):
        assert np.array_equal(getattr(read.rows, name), getattr(job.rows, name)[used]), name
    assert np.array_equal(read.task, job.task[used]) and np.array_equal(read.composed, job.composed[used])
    theirs, ours = read.rows.program, job.rows.program[used]
    assert np.array_equal(read.store.summary[theirs], job.store.summary[ours])
    for one, other in zip(theirs.tolist(), ours.tolist(), strict=True):
        size, slot = int(read.store.bucket[one]), int(read.store.slot[one])
        assert size == job.store.bucket[other]
        written, found = job.store.buckets[size], read.store.buckets[size]
        for field in fields(found):
            expected = getattr(written, field.name)[job.store.slot[other]]
            assert np.array_equal(getattr(found, field.name)[slot], expected), field.name
    part = next(tmp_path.glob("programs-*"))
    part.write_bytes(part.read_bytes()[:-20])
    with pytest.raises(DataError, match="is damaged"):
        TrainingJob.read(tmp_path)
    part.unlink()
    with pytest.raises(DataError, match="lacks some of its files"):
        TrainingJob.read(tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_losses_on_a_gpu_are_those_of_the_processor(tmp_path: Path) -> None:
    losses = {on: run("ranking", tmp_path / on, steps=50, on=on) for on in ("cpu", "cuda")}
    assert len(losses["cpu"]) == 50
    np.testing.assert_allclose(losses["cuda"], losses["cpu"], atol=1e-4)
