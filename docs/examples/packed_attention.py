"""A block on sequences of several lengths, as in ByteTransformer: padded, in a loop, or packed in one kernel."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from cdmpp.predict.predictor import LatencyPredictor

WIDTH, HEADS, LONGEST = 1024, 16, 512
LENGTHS = [round(LONGEST * (0.2 + 0.8 * i / 15)) for i in range(16)]  # 60 % of the longest on average


class Block(nn.Module):
    """A transformer block on ``[tokens, width]``; ``attend`` takes three tensors of ``[tokens, heads, dim]``."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """The block."""
        q, k, v = self.qkv(self.norm(x)).view(-1, 3, HEADS, WIDTH // HEADS).unbind(1)
        x = x + self.out(self.attend(q, k, v).reshape(x.shape))
        return x + self.mlp(self.mlp_norm(x))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Padded: every sequence has the tokens of the longest."""
        rows = (whole.view(-1, LONGEST, HEADS, WIDTH // HEADS).transpose(1, 2) for whole in (q, k, v))
        return nn.functional.scaled_dot_product_attention(*rows).transpose(1, 2)


class Loop(Block):
    """Without padding, one call for each sequence."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One after the other."""
        parts = zip(*(whole.split(LENGTHS) for whole in (q, k, v)), strict=True)
        rows = ([whole.transpose(0, 1)[None] for whole in part] for part in parts)
        attended = [nn.functional.scaled_dot_product_attention(*row)[0].transpose(0, 1) for row in rows]
        return torch.cat(attended)


class Packed(Block):
    """Without padding, one call for all sequences."""

    def __init__(self) -> None:
        super().__init__()
        starts = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
        self.register_buffer("starts", starts)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One kernel."""
        return varlen_attn(q, k, v, self.starts, self.starts, max(LENGTHS), max(LENGTHS))


def main(device: str = "a100-sxm4-80gb") -> dict[str, float]:
    """Milliseconds of the block in each form."""
    predictor, answer = LatencyPredictor.load(), {}
    tokens = {"padded": len(LENGTHS) * LONGEST, "loop": sum(LENGTHS), "packed": sum(LENGTHS)}
    for name, block in (("padded", Block()), ("loop", Loop()), ("packed", Packed())):
        prediction = predictor.predict_module(block, torch.empty(tokens[name], WIDTH), device, dtype="float16")
        answer[name] = prediction.latency_ms
        print(f"{name:6}  {tokens[name]:,} tokens  {answer[name]:5.2f} ms  {prediction.domain}")
    return answer


if __name__ == "__main__":
    main()
