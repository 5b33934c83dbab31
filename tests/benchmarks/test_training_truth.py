"""Rows of the table of training steps: options of ``training_step``, and reasons for rows that are left out."""

import csv
import gzip
import io
from pathlib import Path

import pytest

from benchmarks.training_truth.reinforcement import lengths, read_steps
from benchmarks.training_truth.rows import read_rows

FIELDS = "source model device gpus parallelism dtype framework batch sequence output_tokens quantity unit value note"
PRE = "train_tokens_per_s_per_gpu (Pre-Training Performance)|tokens/s/GPU"
LORA = "train_tokens_per_s_per_gpu (LoRA Performance)|tokens/s/GPU"
NEMO = (
    "nemo-rl|A|H100 BF16|16|gen[tp,pp]=[1,1];train[tp,cp,ep,pp,vpp]=[1,1,1,1,1,2,n/a]|BF16|x|G-GBS=2,048;T-GBS=512||"
    "1,019"
)
ROWS = (
    f"bridge|A (w/o MTP)|DGX-GB200|64|fsdp=0;tp=2;pp=4;cp=1;vp=5;ep=n/a|MXFP8|x|256|8192||{PRE}|2048|mbs=1",
    f"bridge|A|DGX-H100|8|fsdp=8;tp=1;pp=1;cp=1;vp=n/a;ep=1|FP8-CS|x|128|8192||{PRE}|1000|mbs=2;tflops=5[^note]",
    "llm-foundry|small|a100_40gb|8|fsdp=8;FULL_SHARD;act_ckpt=True|bf16|x|32|512||train_tokens_per_s_per_gpu|u|64|"
    "micro_batch=4;grad_accum=1",
    "torchtitan|Llama 3.1 405B|H100 96GB HBM2e 500W (Grand Teton)|512|FSDP 4, CP 2|bf16+float8|x|local=8|65536||"
    "train_tokens_per_s_per_gpu|u|47|Table 6 + torch.compile + AsyncTP + 1F1B. 512 GPUs (TP 8, PP8). Full activation",
    "fms-fsdp|llama-arch 13b|A100 80GB|128|FSDP;ac=Selective AC;compile=Y|bf16|x|local=2|4096||"
    "train_tokens_per_s_per_gpu|u|2150|",
    f"bridge|A|DGX-H100|8|tp=1 (2);pp=1|FP8|x|8|8||{PRE}|1|mbs=1",
    f"bridge|A|DGX-H100|8|tp=1;pp=1|NVFP4|x|8|8||{PRE}|1|mbs=1",
    f"bridge|A|DGX-H100|8|tp=1;pp=1||x|8|8||{PRE}|1|mbs=1",
    f"bridge|B|DGX-H100|8|tp=1;pp=1|BF16|x|8|8||{PRE}|1|mbs=1",
    f"bridge|A|DGX-H100|8|tp=1|FP8|x|8|8||{LORA}|1|mbs=1",
    f"{NEMO}|rl_step_time|s|92.8|GRPO; On policy; max_seq=4,096",
    f"{NEMO}|rl_tokens_per_s_per_gpu|u|1581|GRPO; On policy; max_seq=4,096",
)


@pytest.fixture
def tables(tmp_path: Path) -> tuple[Path, Path]:
    text = io.StringIO()
    csv.writer(text).writerows([FIELDS.split(), *(row.split("|") for row in ROWS)])
    (tmp_path / "e2e_llm_training.csv.gz").write_bytes(gzip.compress(text.getvalue().encode()))
    configs = tmp_path / "configs"
    (configs / "more").mkdir(parents=True)
    (configs / "aliases.csv").write_text("table,name,config\ntraining,A,a.json\n", encoding="utf-8")
    files = ("a.json", "more/small_config.json", "meta-llama--Meta-Llama-3.1-405B_config.json")
    for name in (*files, "more/Llama-2-7b_config.json"):
        (configs / name).write_text("{}", encoding="utf-8")
    return tmp_path, configs


def test_rows_become_options(tables: tuple[Path, Path]) -> None:
    bridge, sharded, foundry, titan, fms = read_rows(*tables)[0]
    expected = {"products": "mxfp8", "sharding": "optimizer", "tp": 2, "pp": 4, "virtual_pp": 5, "ep": 1}
    assert bridge.device.name == "gb200" and expected.items() <= bridge.options.items()
    assert bridge.seconds == pytest.approx(256 * 8192 / 2048 / 64)
    assert (sharded.options["sharding"], sharded.options["micro_batch"]) == ("fsdp", 2)
    assert sharded.options["products"] == "float8_e4m3"
    assert foundry.options["recompute"] == "full" and foundry.options["micro_batch"] == 4
    assert (titan.engine, titan.device.tdp_w, titan.options["overlap"]) == ("torchtitan", 500.0, "all")
    assert (titan.options["tp"], titan.options["pp"], titan.options["cp"]) == (8, 8, 2)
    assert (titan.options["micro_batch"], titan.options["global_batch"]) == (1, 8 * 4)
    assert (fms.config["hidden_size"], fms.options["global_batch"]) == (5120, 256) and "recompute" not in fms.options


def test_rows_left_out_have_reasons(tables: tuple[Path, Path]) -> None:
    reasons = {reason: count for (_, reason), count in read_rows(*tables)[1].items()}
    assert reasons == {
        "two layouts or types in one row": 1,
        "products in NVFP4": 1,
        "no type is stated": 1,
        "no configuration of B": 1,
        "LoRA, no pre-training": 1,
        "a step of reinforcement learning": 2,
    }


def test_rl_steps_are_read_with_the_layouts_of_both_stages(tables: tuple[Path, Path]) -> None:
    (step,) = read_steps(tables[0])
    assert (step.step_s, step.samples, step.mini_batch, step.mean, step.longest) == (92.8, 2048, 512, 1019, 4096)
    assert step.prompt == round(1581 * 16 * 92.8 / 2048 - 1019) and step.colocated and step.generation_tp == 1
    assert step.degrees == {"tp": 1, "cp": 1, "ep": 1, "pp": 2}


def test_cut_lengths_have_the_published_mean() -> None:
    values = lengths(3251, 3992)
    assert sum(values) / len(values) == pytest.approx(3251, rel=1e-3)
    assert max(values) == 3992 and min(values) < 500
