"""Tables of brute-forced schedules become measurements of scheduled programs."""

import json

import numpy as np
import pytest

from cdmpp.data.importers import IMPORTERS, SCHEDULE_IMPORTERS
from cdmpp.data.importers.kernel_tuner.tables import is_kept
from cdmpp.data.labels import PackedTexts
from cdmpp.data.load import detect, find_public_tables, import_table, list_public_tables, load_public, load_table
from cdmpp.data.records import read_records
from cdmpp.data.summary import fingerprint
from cdmpp.data.table import concat
from cdmpp.errors import DataError

GEMM = {
    "device": ["NVIDIA RTX 2080 Ti", "NVIDIA RTX 3090", "NVIDIA RTX 3090", "NVIDIA RTX 3090", "NVIDIA RTX 9999"],
    **{"MWG": [64, 64, 64, 48, 64], "NWG": [32] * 5, "KWG": [32] * 5, "MDIMC": [16] * 5, "NDIMC": [8] * 5},
    **{"MDIMA": [16, 16, 8, 16, 16], "NDIMB": [8] * 5, "KWI": [2] * 5, "VWM": [2] * 5, "VWN": [4] * 5},
    **{"STRM": [0] * 5, "STRN": [0] * 5, "SA": [0] * 5, "SB": [1] * 5, "PRECISION": [32] * 5},
    "latency_us": [30_000.0, 20_000.0, 20_010.0, 1.0, 2.0],
}
HUB = {
    "kernel": ["convolution_kernel"] * 4 + ["nbody"],
    "device": ["NVIDIA RTX 3090"] * 5,
    "collection": ["KernelTuner data/convolution/RTX_3090", *["convolution/RTX_3090"] * 3, "nbody/RTX_3090"],
    **{"block_size_x": [48, 48, 48, 32, 1], "block_size_y": [2] * 5, "tile_size_x": [1] * 5, "tile_size_y": [1] * 5},
    **{"use_padding": [1, 1, 0, 1, 0], "read_only": [0] * 5, "filter_height": [15] * 5, "filter_width": [15] * 5},
    "latency_us": [5000.0, 6000.0, 6001.0, 4000.0, 1.0],
}
CONVOLUTION = {
    **{name: HUB[name][:1] for name in HUB if name not in ("kernel", "collection", "device")},
    "device": ["NVIDIA A100-PCIE-40GB"],
    **{"use_shmem": [1], "use_cmem": [1]},
}


@pytest.mark.parametrize(
    ("columns", "name"),
    [(GEMM, "kernel_tuner_gemm"), (CONVOLUTION, "kernel_tuner_convolution"), (HUB, "kernel_tuner_convolution_older")],
)
def test_tables_of_schedules_are_recognised(columns: dict[str, list[object]], name: str) -> None:
    assert [i.name for i in (*IMPORTERS, *SCHEDULE_IMPORTERS) if i.matches(columns)] == [name]
    assert (detect(columns) or IMPORTERS[0]).name == name


def test_operators_are_never_taken_for_schedules(layout) -> None:
    _, needed, optional = layout
    assert not any(i.matches(needed | optional) for i in SCHEDULE_IMPORTERS)


@pytest.mark.tvm
def test_gemm_rows_become_scheduled_programs(save) -> None:
    table = load_table(save(GEMM))
    # The shape of threads that stage A has no effect where A is not staged: rows 1 and 2 repeat one program.
    assert table.program_key.tolist() == [0, 0, 0, -1, 0]
    assert table.unsupported.array().tolist() == ["", "", "", "inexpressible_schedule", "unknown_device"]
    assert table.provenance["inexpressible"][3] == "sizes that do not divide each other"
    assert table.provenance["parameters"][2].startswith("MWG=64,NWG=32,KWG=32,MDIMC=16,NDIMC=8,MDIMA=8,")
    assert table.provenance["origin"].used() == ("brute-force",)
    assert table.device.array().tolist()[:2] == ["rtx-2080-ti", "rtx-3090"]
    assert (table.backend.used(), table.protocol.used()) == (("tvm",), ("kernel",))
    assert table.tvm.tasks == ("xgemm:m=4096,n=4096,k=4096",)
    assert table.op.used() == ("xgemm",)
    assert table.latency_s[0] == pytest.approx(0.03)
    assert json.loads(table.tvm.texts[0])["nodes"]


@pytest.mark.tvm
def test_hub_rows_become_scheduled_programs(save) -> None:
    table = load_table(save(HUB))
    # The newer collections ran without padding, so a padded program was not measured; 32 columns need no padding.
    assert table.program_key.tolist()[1] == -1
    assert table.unsupported.array().tolist() == ["", "inexpressible_schedule", "", "", "unknown_operator"]
    assert table.provenance["inexpressible"][1] == "padding that the collection ran without"
    assert len(set(table.program_key.tolist())) == 4
    assert table.provenance["collection"][1] == "convolution/RTX_3090"
    assert set(table.source.used()) == {"kernel_tuner_convolution_older", "nbody"}


@pytest.mark.tvm
def test_other_kernels_of_the_hub_become_scheduled_programs(save) -> None:
    columns = {
        "kernel": ["dedispersion_kernel", "cn_pnpoly"],
        "device": ["AMD MI250X", "NVIDIA RTX 3090"],
        "collection": ["dedispersion_milo/MI250X", "pnpoly/RTX_3090"],
        **{"block_size_x": [32, 64], "block_size_y": [4, None], "block_size_z": [1, None]},
        **{"tile_size_x": [2, None], "tile_size_y": [2, None], "tile_stride_x": [1, None], "tile_stride_y": [0, None]},
        **{"loop_unroll_factor_channel": [0, None], "tile_size": [None, 2]},
        **{"between_method": [None, 1], "use_method": [None, 2], "latency_us": [9000.0, 80_000.0]},
    }
    table = load_table(save(columns))
    assert table.unsupported.used() == ("",)
    assert [name.partition(":")[0] for name in table.tvm.tasks] == ["dedispersion", "pnpoly"]
    assert table.source.array().tolist() == ["kernel_tuner_dedispersion", "kernel_tuner_pnpoly"]
    assert table.op.array().tolist() == ["dedispersion", "pnpoly"]


@pytest.mark.tvm
def test_both_versions_of_the_convolution_are_one_program(save) -> None:
    older, newer = load_table(save(HUB)), load_table(save(CONVOLUTION, "newer.parquet"))
    both = concat([older, newer])
    assert both.program_key[-1] == both.program_key[0]
    assert both.n_programs == older.n_programs == 3
    assert list(both.tvm.texts) == list(older.tvm.texts)


@pytest.mark.tvm
def test_share_keeps_the_same_configurations_on_every_device(save) -> None:
    path = save({**GEMM, "MWG": [64, 64, 64, 128, 128], "device": ["NVIDIA RTX 3090"] * 5, "VWN": [4, 4, 4, 4, 4]})
    whole = load_table(path)
    sizes = set()
    for share in (0.2, 0.5, 0.8):
        thin = load_table(path, share)
        kept = set(thin.source_row.tolist())
        # Rows of one program stay together.
        assert kept in (set(), {0, 1, 2}, {3, 4}, {0, 1, 2, 3, 4})
        assert thin.n_programs == len({whole.tvm.hashes[k] for k in thin.program_key.tolist()})
        sizes.add(len(kept))
    assert is_kept("a", 1.0)
    kept_at = [np.mean([is_kept(str(i), share) for i in range(1000)]) for share in (0.1, 0.5)]
    assert kept_at == pytest.approx([0.1, 0.5], abs=0.05)


@pytest.mark.tvm
def test_imported_records_hold_the_same_rows(save, tmp_path, monkeypatch) -> None:
    out = tmp_path / "records.parquet"
    table = import_table(save(GEMM), out)
    monkeypatch.setattr("cdmpp.data.records.PACKED_FROM", 1000)
    again = read_records(out)
    assert isinstance(again.tvm.texts, PackedTexts)
    assert fingerprint(again) == fingerprint(table)
    assert list(again.tvm.texts) == list(table.tvm.texts)
    assert again.unsupported.array().tolist() == table.unsupported.array().tolist()
    assert again.provenance["inexpressible"].array().tolist() == table.provenance["inexpressible"].array().tolist()


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5])
def test_share_outside_of_its_range_is_refused(save, share: float) -> None:
    with pytest.raises(DataError, match=f"share {share}"):
        load_table(save(GEMM), share)


def test_share_of_a_table_of_operators_is_refused(save, columns_of) -> None:
    with pytest.raises(DataError, match="no public table of schedules") as caught:
        load_table(save(columns_of("vidur")), 0.5)
    assert "kernel_tuner_gemm" in caught.value.hint


@pytest.mark.tvm
def test_public_schedules_are_loaded_only_by_name(save, tmp_path) -> None:
    save(GEMM, "sched_kerneltuner_gemm.parquet")
    save(HUB, "sched_benchmark_hub.parquet")
    with pytest.raises(DataError, match="lacks") as caught:
        find_public_tables(tmp_path)
    assert "kernel_tuner" not in caught.value.message
    assert load_public(tmp_path, ["kernel_tuner_gemm"]).source.used() == ("kernel_tuner_gemm",)
    table = load_public(tmp_path, ["kernel_tuner_convolution_older"])
    assert table.source.used() == ("kernel_tuner_convolution_older",)
    assert len(table) == 4
    hub = next(t for t in list_public_tables(tmp_path) if t.path.name == "sched_benchmark_hub.parquet")
    other = hub.load(["kernel_tuner_pnpoly"])
    assert (len(other), other.n_programs) == (0, 0)


def test_packed_texts_are_a_sequence() -> None:
    texts = ["a" * 1000, "b", ""]
    packed = PackedTexts(texts)
    assert (len(packed), list(packed), packed[1], list(packed[1:]), packed[-1]) == (3, texts, "b", ["b", ""], "")
    assert list(PackedTexts([*PackedTexts.entries(packed), "c"])) == [*texts, "c"]
