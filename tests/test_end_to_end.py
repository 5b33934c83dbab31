"""Whole networks against public labels: the networks, the study's arithmetic, and what the documents
say of it.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.end_to_end import content, images, report, transformers
from benchmarks.end_to_end.labels import Label
from benchmarks.end_to_end.listed import listed_parts
from benchmarks.end_to_end.study import UPLOAD_BYTES_PER_S, answer_labels, launches_of, upload_s
from benchmarks.report.markdown import percent
from cdmpp import LatencyPredictor
from cdmpp.programs.frontends.torch_eager import eager_trace

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
LABEL = Label("torchvision", "resnet18", "rtx-2080-ti", "inference", "float16", 12, 224, 2.85e-3)


def listed(target: str, inputs: str, output: str) -> dict[str, str]:
    return {"target": target, "input_shapes": inputs, "output_shape": output, "mode": "inf", "fw_us": "2", "bw_us": "0"}


#: GPT-2 large, batch 4, 1024 tokens: what the source lists of the layer's first half and of the head.
ROWS = [
    listed("transformer.wte", "[[4, 1024]]", "(4, 1024, 1280)"),
    listed("transformer.h.0.ln_1", "[[4, 1024, 1280]]", "(4, 1024, 1280)"),
    listed("addmm", "[[3840], [4096, 1280], [1280, 3840]]", "(4096, 3840)"),
    listed("matmul", "[[4, 20, 1024, 64], [4, 20, 64, 1024]]", "(4, 20, 1024, 1024)"),
    listed("pow", "[[1]]", "(1,)"),
    listed("softmax", "[[4, 20, 1024, 1024]]", "(4, 20, 1024, 1024)"),
    listed("transformer.ln_f", "[[4, 1024, 1280]]", "(4, 1024, 1280)"),
    listed("lm_head", "[[4, 1024, 1280]]", "(4, 1024, 50257)"),
]


def test_the_decoder_launches_what_the_source_lists() -> None:
    tokens = torch.empty(4, 1024, dtype=torch.int64, device="meta")
    trace = eager_trace(transformers.make("gpt2_large", False, layers=1), [tokens])
    assert trace.unsupported == ()
    traced, wanted = transformers.traced_kernels(trace.launches), transformers.listed_kernels(ROWS)
    assert wanted == Counter(
        {
            ("layernorm", (4096, 1280)): 2,
            ("linear", (4096, 3840, 1280)): 1,
            ("bmm", (80, 1024, 1024, 64)): 1,
            ("softmax", (81920, 1024)): 1,
            ("linear", (4096, 50257, 1280)): 1,
        }
    )
    assert wanted - traced == Counter()


def test_training_has_each_product_twice_more() -> None:
    label = Label("neusight", "gpt2_large", "t4", "training", "float32", 1, 64, 1.0)
    products = Counter(
        one.phase for one in launches_of(label) if one.spec.operator == "linear"
    )  # four in each of 36 layers, and the head
    assert products == {"forward": 4 * 36 + 1, "backward": 2 * (4 * 36 + 1)}


def test_the_sources_own_kernels_are_summed_with_the_layer_as_often_as_it_is_there() -> None:
    label = Label("neusight", "gpt2_large", "t4", "inference", "float32", 4, 1024, 1.0)
    found = listed_parts([label, LABEL], {("t4", "gpt2_large", "inference", 4, 1024): ROWS})
    # Five rows of 2 µs belong to the layer, three stand around it.
    assert found == {label: (pytest.approx((36 * 5 + 3) * 2e-6), 0.0)}


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("resnet50", 25.557),
        ("resnext50_32x4d", 25.029),
        ("wide_resnet50_2", 68.883),
        ("vgg16", 138.358),
        ("squeezenet1_1", 1.235),
        ("mnasnet1_0", 4.383),
        ("shufflenet_v2_x1_0", 2.279),
        ("densenet121", 7.979),
        ("vit_base_patch16_224", 86.568),
        ("mobilenetv2_100", 3.505),
    ],
)
def test_image_networks_have_the_published_number_of_parameters(name: str, millions: float) -> None:
    network = images.make(name, False, 224)
    assert sum(p.numel() for p in network.parameters()) / 1e6 == pytest.approx(millions, abs=1e-3)


def test_a_label_is_answered() -> None:
    (found,) = answer_labels([LABEL], LatencyPredictor.load(), {LABEL: (3e-3, 0.0)})
    assert found.kernels == 68
    assert found.roofline_s < found.queued_s < found.called_s and found.module_s == sum(
        found.module_parts_s
    ) + upload_s(LABEL)
    assert found.parts_s == (found.called_s, 0.0)
    assert found.error("listed") == pytest.approx(3 / 2.85 - 1)
    assert sum(share for _, share in found.largest) <= 1
    figures = content.figures([found])
    assert figures["called"]["mape"] == abs(found.error()) and figures["listed"]["n"] == 1
    assert "68" in json.dumps(content._row(found))


def test_training_clears_and_adds_gradients_as_the_source_does() -> None:
    label = replace(LABEL, mode="training")
    network = images.make("resnet18", True, 224)
    calls = Counter(launch.call for launch in launches_of(label))
    assert calls["zero_"] == len(list(network.parameters()))
    assert upload_s(label) == 12 * 3 * 224**2 * 2 / UPLOAD_BYTES_PER_S and upload_s(replace(label, source="timm")) == 0


def results(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8"))
    return found


def test_the_document_says_what_was_found() -> None:
    text = (ROOT / "docs" / "replay.md").read_text(encoding="utf-8")
    for row in results("end_to_end.json")["by_source"]:
        start = f"| {report.TITLES[row['source']]}, {row['mode']} | {row['n']} | "
        bold = f"**{percent(row[report.HEADLINES[row['source']]]['mape'])}**"
        assert any(line.startswith(start) and bold in line for line in text.splitlines())
