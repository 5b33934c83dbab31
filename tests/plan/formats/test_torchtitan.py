"""Jobs of torchtitan."""

import tomllib
from typing import Any

import pytest

from cdmpp import make_plan
from cdmpp.errors import FieldError
from cdmpp.plan.formats import export_plan, import_request
from cdmpp.plan.registry import PLANNERS

COST = {"forward_s": 1.0, "backward_s": 2.0}
JOB = """
[job]
dump_folder = "./outputs"
[model]
name = "llama3"
flavor = "debugmodel_flex_attn"
[optimizer]
lr = 8e-4
[training]
local_batch_size = 8
seq_len = 2048
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 1
tensor_parallel_degree = 2
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "Interleaved1F1B"
[activation_checkpoint]
mode = "full"
"""


def test_job_becomes_a_step() -> None:
    found = import_request("torchtitan", JOB, "simulate", device="h100-sxm")
    request = PLANNERS["simulate"].read(found.request)
    request.check()
    assert len(request.stages) == 4 and request.ranks == 2 and request.micro_batches == 8
    assert request.schedule == "interleaved" and request.replicas == [8]
    blocks = [
        sum(w["count"] for w in stage["forward"]["programs"] if w["program"]["operator"] == "attention_prefill")
        for stage in found.request["stages"]
    ]
    assert blocks == [1, 2, 2, 1]  # as torchtitan divides 6 layers, embedding and output
    assert found.ignored == ("job.dump_folder", "optimizer.lr")


def test_modules_of_the_stages_are_read_back() -> None:
    request = import_request("torchtitan", JOB, "split", device="h100-sxm").request
    layers = [{key: layer[key] for key in ("name", "count") if key in layer} | COST for layer in request["layers"]]
    plan = make_plan("split", {"layers": layers, "ranks": 2, "micro_batches": 8})
    text = export_plan("torchtitan", "split", request, plan).text
    table = tomllib.loads(text)["parallelism"]
    assert table["tensor_parallel_degree"] == 2 and table["pipeline_parallel_degree"] == 2
    parts = table["module_fqns_per_model_part"]
    assert parts[0][:2] == ["tok_embeddings", "layers.0"] and parts[-1][-3:] == ["layers.5", "norm", "output"]
    sizes = [stage["last_layer"] - stage["first_layer"] + 1 for stage in plan["stages"]]
    assert [len(parts[0]), len(parts[1]) - 1] == sizes
    job = JOB[: JOB.index("[parallelism]")] + text
    again = import_request("torchtitan", job, "simulate", device="h100-sxm").request
    assert len(again["stages"]) == 2 and again["schedule"] == "1f1b"


def test_dimensions_may_come_from_hugging_face(tmp_path: Any) -> None:
    config = tmp_path / "config.json"
    config.write_text(
        '{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, '
        '"num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 256}'
    )
    text = JOB.replace("debugmodel_flex_attn", "mine")
    found = import_request("torchtitan", text, "split", device="h100-sxm", model=str(config)).request
    assert found["layers"][1]["count"] == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("debugmodel_flex_attn", "9B"), "flavor '9B'"),
        (("Interleaved1F1B", "ZBVZeroBubble"), "'ZBVZeroBubble' is not known"),
        (("seq_len = 2048", "seq_len = 0"), "not a whole number"),
        (("tensor_parallel_degree = 2", "tensor_parallel_degree = 3"), "do not divide"),
        (("tensor_parallel_degree = 2", "context_parallel_degree = 2"), "context_parallel_degree"),
        (("pipeline_parallel_degree = 2", "pipeline_parallel_degree = 8"), "too many"),
        (("pipeline_parallel_degree = 2", 'pipeline_parallel_schedule_csv = "a.csv"'), "in another file"),
        (("[model]", "[model"), "not TOML"),
    ],
)
def test_jobs_that_no_request_has_are_refused(change: tuple[str, str], message: str) -> None:
    with pytest.raises(FieldError, match=message) as caught:
        import_request("torchtitan", JOB.replace(*change), "simulate", device="h100-sxm")
    assert caught.value.hint
