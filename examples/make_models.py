"""Make the two ONNX models that the demonstration predicts: layer shapes of real networks, in few kilobytes.

A latency depends on shapes, not on the values of weights. The models are exported from torch, then each
weight is replaced by a ``ConstantOfShape`` node: valid ONNX that runs, without the megabytes.

    python examples/make_models.py [FOLDER]
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from torch import Tensor, nn

OPSET = 17
#: Constants up to this many elements keep their values: scales, epsilons, shapes.
KEPT = 64


class TransformerBlock(nn.Module):
    """One encoder block of BERT-base: 768 wide, 12 heads, 3072 in the feed-forward part."""

    def __init__(self, hidden: int = 768, heads: int = 12, ffn: int = 3072) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(hidden, hidden) for _ in range(4))
        self.up, self.down = nn.Linear(hidden, ffn), nn.Linear(ffn, hidden)
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape

        def split(y: Tensor) -> Tensor:
            return y.reshape(batch, length, self.heads, hidden // self.heads).transpose(1, 2)

        q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
        scores = torch.matmul(q, k.transpose(2, 3)) / (hidden // self.heads) ** 0.5
        context = torch.matmul(torch.softmax(scores, dim=-1), v).transpose(1, 2)
        x = self.norm1(x + self.out(context.reshape(batch, length, hidden)))
        return self.norm2(x + self.down(nn.functional.gelu(self.up(x))))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut; batch normalisation is folded into the convolutions."""

    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(c_in, c_out, 3, stride, 1)
        self.second = nn.Conv2d(c_out, c_out, 3, 1, 1)
        self.short = nn.Conv2d(c_in, c_out, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.second(torch.relu(self.first(x))) + self.short(x))


class SmallResNet(nn.Module):
    """The layers of ResNet-18 for 224x224 images."""

    def __init__(self) -> None:
        super().__init__()
        stages: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        channels = 64
        for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            stages += [BasicBlock(channels, width, stride), BasicBlock(width, width, 1)]
            channels = width
        self.stages = nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(channels, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(x))


def export(model: nn.Module, x: Tensor) -> onnx.ModelProto:
    """The model as ONNX, without weights and without where it was made."""
    buffer = io.BytesIO()
    torch.onnx.export(
        model.eval(), (x,), buffer, opset_version=OPSET, input_names=["x"], output_names=["y"], dynamo=False
    )
    return without_weights(onnx.load_from_string(buffer.getvalue()))


def without_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Large initializers as ``ConstantOfShape``; source positions and other metadata removed."""
    graph = model.graph
    kept, made = [], []
    for tensor in graph.initializer:
        if np.prod(tensor.dims) <= KEPT:
            kept.append(tensor)
            continue
        shape = f"{tensor.name}.shape"
        kept.append(numpy_helper.from_array(np.asarray(tensor.dims, np.int64), shape))
        dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
        value = numpy_helper.from_array(np.full(1, 0.01, dtype))
        made.append(helper.make_node("ConstantOfShape", [shape], [tensor.name], f"{tensor.name}.fill", value=value))
    nodes = [*made, *graph.node]
    del graph.node[:], graph.initializer[:], graph.value_info[:], model.metadata_props[:]
    graph.node.extend(nodes)
    graph.initializer.extend(kept)
    graph.doc_string = ""
    for node in graph.node:
        node.doc_string = ""
        del node.metadata_props[:]
    onnx.checker.check_model(model, full_check=True)
    return model


def main() -> None:
    """Write both models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent)
    folder: Path = parser.parse_args().folder
    torch.manual_seed(0)
    for name, model, x in (
        ("transformer_block", TransformerBlock(), torch.zeros(8, 128, 768)),
        ("small_resnet", SmallResNet(), torch.zeros(8, 3, 224, 224)),
    ):
        path = folder / f"{name}.onnx"
        path.write_bytes(export(model, x).SerializeToString())
        print(f"{path.name}: {path.stat().st_size / 1000:.1f} kB")


if __name__ == "__main__":
    main()
