"""Profiles for LLMServingSim have its files and columns (docs/docs/profiler/output-bundle.md of its repository)."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from cdmpp.errors import DataError, FieldError
from cdmpp.integrations.llmservingsim import write_profile
from cdmpp.predict.predictor import LatencyPredictor

EXAMPLES = Path(__file__).parents[2] / "examples" / "llm"
SMALL: dict[str, Any] = {"max_tokens": 48, "max_sequences": 3, "max_cached": 64}
NAMES = {"hardware": "L4", "model": "meta-llama/Llama-3.1-8B"}


@pytest.fixture(scope="module")
def profile(predictor: LatencyPredictor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("perf")
    return write_profile(EXAMPLES / "llama-3.1-8b.json", "l4", folder, tp=(1, 2), predictor=predictor, **NAMES, **SMALL)


def test_folder_names_and_meta_agree(profile: Path) -> None:
    assert profile.parts[-4:] == ("L4", "meta-llama", "Llama-3.1-8B", "bf16")
    assert sorted(path.name for path in profile.iterdir()) == ["meta.yaml", "tp1", "tp2"]
    assert [path.name for path in profile.parent.iterdir()] == ["bf16"]
    meta = yaml.safe_load((profile / "meta.yaml").read_text())
    assert (meta["hardware"], meta["model"], meta["variant"]) == ("L4", "meta-llama/Llama-3.1-8B", "bf16")
    assert meta["tp_degrees"] == [1, 2]
    assert meta["engine_effective"] == {"max_num_batched_tokens": 48, "max_num_seqs": 3}


def test_layers_have_the_kernel_times_of_their_operators(profile: Path, predictor: LatencyPredictor) -> None:
    dense = pd.read_csv(profile / "tp1" / "dense.csv")
    # The layers of LLMServingSim's profiler/models/llama.yaml.
    assert set(dense.layer) == {
        "embedding", "layernorm", "qkv_proj", "rotary_emb", "o_proj", "gate_up_proj", "act_fn", "down_proj",
        "final_layernorm",
    }  # fmt: skip
    assert sorted(set(dense.tokens)) == [1, 2, 4, 8, 16, 32, 48]
    [own] = dense[(dense.layer == "qkv_proj") & (dense.tokens == 48)].time_us
    program = "linear:m=48,n=6144,k=4096,dtype=bfloat16"
    [want] = predictor.predict([program], "l4", framework="vllm")
    assert own == pytest.approx(1e6 * (want.latency_s or 0), rel=1e-5)
    per_sequence = pd.read_csv(profile / "tp1" / "per_sequence.csv")
    assert list(per_sequence.groupby("layer").sequences.apply(list)) == [[1, 2, 3]] * 2
    assert set(per_sequence.layer) == {"lm_head", "sampler"}


def test_attention_has_a_row_for_each_point_of_the_grid(profile: Path) -> None:
    table = pd.read_csv(profile / "tp2" / "attention.csv")
    assert list(table.columns) == [
        "layer", "prefill_chunk", "prefill_key", "n_decode", "kv_decode", "decode_q_len", "time_us",
    ]  # fmt: skip
    assert sorted(set(table.prefill_chunk)) == [0, 16, 32, 48]
    # Cached tokens and half the chunk.
    assert sorted(set(table[table.prefill_chunk == 32].prefill_key)) == [16, 32, 48, 80]
    key = ["prefill_chunk", "prefill_key", "n_decode", "kv_decode"]
    time = table.set_index(key).time_us
    assert time.index.is_unique and (time > 0).all()
    assert len(time) == (1 + 3 * 4) * (1 + 3 * 3) - 1
    assert time[32, 48, 2, 64] == pytest.approx(time[32, 48, 0, 0] + time[0, 0, 2, 64], rel=1e-5)


def test_types_name_the_variant(predictor: LatencyPredictor, tmp_path: Path) -> None:
    written = write_profile(
        EXAMPLES / "llama-3.1-8b.json", "h200", tmp_path, weights="float8_e4m3", kv_dtype="float8_e4m3",
        predictor=predictor, **NAMES, **SMALL,
    )  # fmt: skip
    assert written.name == "fp8-kvfp8"


def test_wrong_requests_write_nothing(predictor: LatencyPredictor, profile: Path, tmp_path: Path) -> None:
    llama = EXAMPLES / "llama-3.1-8b.json"
    for config, changed, message in (
        (EXAMPLES / "qwen3-30b-a3b.json", {}, "has experts"),
        (EXAMPLES / "gpt2-xl.json", {}, "learned positions, feed-forward layers without a gate, other norms"),
        (llama, {"hardware": "../x"}, r"hardware: '\.\./x' is not allowed"),
        (llama, {"model": "a/../b"}, "model"),
        (llama, {"max_tokens": 8}, "max_tokens: 8 is not allowed"),
        (llama, {"tp": (3,)}, "tp: 3 does not divide"),
    ):
        with pytest.raises(FieldError, match=message):
            write_profile(config, "l4", tmp_path, predictor=predictor, **{**NAMES, **SMALL, **changed})
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DataError, match="exists already"):
        write_profile(llama, "l4", profile.parents[3], predictor=predictor, **NAMES, **SMALL)
