"""No file from elsewhere blocks a reader, fills the memory or runs code: each reader raises a CdmppError."""

import gzip
import json
import lzma
import os
import random
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cdmpp.cli.llm import _trace
from cdmpp.cli.reading import read_json
from cdmpp.data.load import load_table
from cdmpp.data.measure import archive
from cdmpp.data.measure.kit import parts
from cdmpp.data.measure.todo import read_todo
from cdmpp.data.pool import read_pool
from cdmpp.data.split_file import read_splits
from cdmpp.devices import load_device
from cdmpp.errors import CdmppError, DataError, FieldError
from cdmpp.llm import read_config
from cdmpp.llm.engines.profile import EngineProfile, load_engine
from cdmpp.llm.serving.calibrate import fit_engine, read_measurements
from cdmpp.llm.training.calibrate import fit_training
from cdmpp.model.artifact.folder import read_manifest
from cdmpp.plan.formats import FORMATS, import_request
from cdmpp.plan.rl.from_config import read_lengths
from cdmpp.plan.sweep import read_sweep
from cdmpp.predict.modules.execution import HostProfile, host_profile
from cdmpp.predict.tables.sources import open_table
from cdmpp.programs.frontends.load import load_programs
from cdmpp.programs.frontends.relax_programs import read_exported
from cdmpp.simulate.replay.parquet import read_parquet
from cdmpp.simulate.traces.load import read_trace
from cdmpp.train.config import load_config
from cdmpp.train.job import TrainingJob
from cdmpp.train.run import prepared_config
from cdmpp.utils import files

pytestmark = pytest.mark.timeout(120)
Read = Callable[[Path], object]


def rows(path: Path) -> None:
    """Every row of a table of operators; a row that cannot be read is an error of its own."""
    table = open_table(path)
    for part in table.slices():
        errors = [row.cells for row in table.read(part, table.columns) if isinstance(row.cells, CdmppError)]
        raise errors[0] if errors else DataError("read")
    empty()


def in_folder(name: str, read: Read) -> Read:
    """Reads the folder in which the file has a name."""

    def reader(path: Path) -> object:
        place = path.parent / "folder" / name
        place.parent.mkdir(parents=True)
        os.rename(path, place)
        return read(path.parent / "folder")

    return reader


READERS: dict[str, tuple[str, Read]] = {
    "config": (".json", read_config),
    "quantisation": (".json", in_folder("hf_quant_config.json", lambda folder: _with_config(folder))),
    "engine": (".toml", load_engine),
    "host": (".toml", lambda path: host_profile(None, path)),
    "sweep": (".toml", read_sweep),
    "training": (".toml", load_config),
    "prepared": (".json", in_folder("config.json", prepared_config)),
    "job": (".json", in_folder("job.json", TrainingJob.read)),
    "device json": (".json", lambda path: load_device(str(path))),
    "device toml": (".toml", lambda path: load_device(str(path))),
    "measured csv": (".csv", lambda path: fit_engine({}, "h100-sxm", read_measurements(path))),
    "measured json": (".json", lambda path: fit_engine({}, "h100-sxm", read_measurements(path))),
    "measured steps": (".csv", lambda path: fit_training({}, "h100-sxm", path)),
    "measured steps json": (".json", lambda path: fit_training({}, "h100-sxm", path)),
    "lengths": (".csv", read_lengths),
    "requests": (".csv", lambda path: _trace(path) or empty()),
    "request": (".json", read_json),
    "pool json": (".json", read_pool),
    "pool text": (".txt", read_pool),
    "pool table": (".csv", read_pool),
    "table text": (".txt", rows),
    "table csv": (".csv", rows),
    "table parquet": (".parquet", rows),
    "records": (".parquet", load_table),
    "records csv": (".csv", load_table),
    "records gzip": (".csv.gz", load_table),
    "splits": (".parquet", read_splits),
    "replay": (".parquet", read_parquet),
    "trace": (".json", read_trace),
    "trace gzip": (".json.gz", read_trace),
    "trace sqlite": (".sqlite", read_trace),
    "selection": (".json", in_folder("select.json", read_todo)),
    "archive": (".json", in_folder("manifest.json", archive.read_job)),
    "kit": (".json", in_folder("home/job.json", lambda folder: parts.read_job(folder))),
    "kit part": (".zip", parts.read_part),
    "kit result": (".npz", parts.read_results),
    "model": (".json", in_folder("manifest.json", read_manifest)),
    "onnx": (".onnx", load_programs),
    "tvmscript": (".py", load_programs),
    "tvm": (".json", load_programs),
    "exported": (".pt2", load_programs),
    "database": (".json", in_folder("database_workload.json", load_programs)),
}


def empty() -> None:
    raise DataError("no rows")


CONFIG: dict[str, Any] = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128}
CONFIG |= {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}


def _with_config(folder: Path) -> object:
    (folder / "config.json").write_text("{}")
    return read_config(folder)


CONTENT: dict[str, bytes | Callable[[Path], None]] = {
    "fifo": os.mkfifo,
    "zero": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
    "empty": b"",
    "junk": random.Random(0).randbytes(5000),
    "null bytes": b"\0" * 70_000,
    "lists": b"[" * 100_000,
    "objects": b'{"a":' * 100_000,
    "nested toml": b"a = " + b"[" * 50_000,
    "deep json": b"[" * 400 + b"]" * 400,
    "digits": b"a = " + b"9" * 5000,
    "digits json": b'{"a": ' + b"9" * 5000 + b"}",
    "dotted": b".".join([b"a"] * 50_000) + b" = 1",
    "quoted": b".".join([b'"a"'] * 50_000) + b" = 1",
    "long cell": b"batch,input\n" + b"1" * 200_000 + b",1\n",
    "quote": b'batch,input\n"' + b"1,\n" * 200_000,
    "many columns": b",".join([b"a"] * 100_000) + b"\n",
    "gzip": gzip.compress(b"\0" * 2**28, 1),
}


@pytest.mark.parametrize("kind", CONTENT)
@pytest.mark.parametrize("reader", READERS)
def test_hostile_files_are_errors(tmp_path: Path, reader: str, kind: str) -> None:
    suffix, read = READERS[reader]
    path, content = tmp_path / f"file{suffix}", CONTENT[kind]
    path.write_bytes(content) if isinstance(content, bytes) else content(path)
    with pytest.raises(CdmppError) as caught:
        value = read(path)
        assert (reader, kind) == ("training", "empty"), value  # all fields have defaults
        empty()
    assert len(caught.value.message) < 2000 and "\n" not in caught.value.message


TEXTS = [content[:100_000].decode(errors="replace") for content in CONTENT.values() if isinstance(content, bytes)]
IMPORTS = [(name, kind) for name, item in FORMATS.items() if (cls := item.importer()) for kind in cls.kinds]


@pytest.mark.slow
@pytest.mark.parametrize(("format", "kind"), IMPORTS)
def test_hostile_texts_of_other_frameworks_are_errors_or_ignored(format: str, kind: str) -> None:
    needed = {name for name, field in FORMATS[format].importer().model_fields.items() if field.is_required()}
    for text in [*TEXTS, "a" * 5_000_000, "a: &a [" + "*a," * 1000 + "]", "- " * 3000]:
        try:
            imported = import_request(format, text, kind, **{n: "h100-sxm" if n == "device" else 4 for n in needed})
        except CdmppError:
            continue
        assert len(json.dumps(imported.request)) < 10_000, "the text has no request"


@pytest.mark.parametrize("suffix", [".npz", ".zip", ".parquet", ".csv.gz", ".json.gz", ".xz"])
def test_packed_files_unpack_to_a_bounded_size(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_UNPACKED_BYTES", 2**20)
    monkeypatch.setattr("cdmpp.data.measure.runtime.run.MAX_MEMBER_BYTES", 2**20)
    path, zeros = tmp_path / f"rows-0{suffix}", b"0" * 2**25
    if suffix == ".npz":
        np.savez_compressed(path, **dict.fromkeys(("head", "machines", "items"), np.zeros(2**22)))
        read: Read = parts.read_results
    elif suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
            packed.writestr("part.json", zeros)
        read = parts.read_part
    elif suffix == ".parquet":
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        pq.write_table(pa.table({"program": [zeros]}), path, compression="zstd", use_dictionary=False)
        read = load_table
    elif suffix == ".xz":
        path.write_bytes(lzma.compress(zeros))
        read = lambda path: files.parse_file(path, lambda _: files.read_xz(path, 2**20), "xz", "")  # noqa: E731
    else:
        content = b"program,latency_us\n" + b"a,1\n" * 2**22 if "csv" in suffix else b"[" + b" " * 2**24
        path.write_bytes(gzip.compress(content))
        read = load_table if "csv" in suffix else read_trace
    assert path.stat().st_size < 2**18
    with pytest.raises(CdmppError, match=r"unpacks to|more than"):
        read(path)


@pytest.mark.parametrize("form", ["npz", "part", "pt2"])
def test_zip_files_unpack_to_the_size_they_state(tmp_path: Path, form: str) -> None:
    suffix, name = {"part": ("zip", "part.json"), "pt2": ("pt2", "a/models/model.json")}.get(form, ("npz", "head.npy"))
    path = tmp_path / f"rows.{suffix}"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr(name, bytes(2**27))
        packed.filelist[0].file_size = 2**14  # the list of members lies
    read: Read = {"part": parts.read_part, "pt2": read_exported}.get(form, parts.read_results)
    if form == "pt2":
        pytest.importorskip("torch")
        import torch.export  # noqa: F401
    tracemalloc.start()
    try:
        with pytest.raises(CdmppError):
            read(path)
        assert tracemalloc.get_traced_memory()[1] < 2**25
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("missing", ["files", "programs", "settings", "configurations", "kind", "tvm", ""])
def test_manifest_without_a_field_is_an_error(tmp_path: Path, missing: str) -> None:
    manifest = {name: {} for name in ("files", "programs", "settings", "configurations", "kind", "tvm")}
    manifest.pop(missing, None)
    (tmp_path / "manifest.json").write_text(json.dumps({"format": archive.FORMAT, **manifest}))
    for read in (archive.read_job, lambda job: archive.finish(job, tmp_path / "out")):
        with pytest.raises(DataError, match="not the manifest of a job"):
            read(tmp_path)


@pytest.mark.parametrize(
    "stated", [3, {}, {"quantization": 5}, {"quantization": {}}, {"quantization": {"quant_algo": 8}}]
)
def test_quantisation_file_without_types_is_an_error(tmp_path: Path, stated: Any) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(stated))
    with pytest.raises(DataError, match="hf_quant_config"):
        read_config(tmp_path)


@pytest.mark.slow
def test_many_measurements_and_configurations_of_rows_are_refused(tmp_path: Path) -> None:
    table = tmp_path / "rows.csv"
    table.write_text("batch,input,output,total_s\n" + "1,1,1,1\n" * 100_000)
    with pytest.raises(DataError, match="more than 500 rows"):
        read_measurements(table)
    os.mkfifo(tmp_path / "pipe")
    row = {"batch": 1, "input": 8, "output": 8, "total_s": 1.0}
    with pytest.raises(DataError, match="more than 500 measurements"):
        fit_engine(CONFIG, "h100-sxm", [row] * 100_000)
    with pytest.raises(DataError, match=r"row 1: .*not a regular file"):
        fit_engine(CONFIG, "h100-sxm", [{**row, "config": str(tmp_path / "pipe")}] * 2)


@pytest.mark.parametrize("value", [True, 10**400, "9" * 5000, [1.0], "nan"])
@pytest.mark.parametrize("duration", ["total_s", "ttft_s", "tpot_s", "step_s"])
def test_value_that_is_no_duration_is_an_error(duration: str, value: Any) -> None:
    row = {"batch": 1, "input": 8, "output": 8, duration: value}
    step = {"gpus": 8, "micro_batch": 1, "global_batch": 8, "sequence": 128, duration: value}
    with pytest.raises((DataError, FieldError), match=r"is no duration|step_s|measurement 1"):
        fit_training(CONFIG, "h100-sxm", [step] * 4) if duration == "step_s" else fit_engine(
            CONFIG, "h100-sxm", [row] * 2
        )


@pytest.mark.parametrize("cls", [EngineProfile, HostProfile])
def test_profile_takes_numbers_only(cls: Any) -> None:
    fields = {"name": "mine", "host": {"launch_s" if cls is EngineProfile else "gap_s": True}}
    with pytest.raises(FieldError, match="valid number"):
        cls.of(fields, "mine")


def test_profile_with_control_characters_is_written_and_read(tmp_path: Path) -> None:
    text = "".join(map(chr, [*range(1, 32), 127])) + "\"\\'"
    profile = EngineProfile.of({"name": text, "fused": [text], "source": {text: text}}, "mine")
    profile.write(tmp_path / "mine.toml")
    again = load_engine(tmp_path / "mine.toml")
    assert again.model_dump(exclude={"framework"}) == profile.model_dump(exclude={"framework"})
