"""Random specifications of every operator, sizes of 1 and other degenerate ones among them."""

import contextlib
from typing import Any

import numpy as np

from cdmpp.errors import InvalidProgramError
from cdmpp.programs.attention import cache_dtypes, projections
from cdmpp.programs.elements import combinations
from cdmpp.programs.operators import OperatorSpec, lowered_operators, make_operator
from cdmpp.programs.products import BALANCES
from cdmpp.programs.vectors import Conv2d

#: Drawn more often than the others: their structure depends on their sizes.
_OFTEN = ("conv2d", "attention_prefill", "attention_decode", "linear", "max_pool2d")


def random_specs(count: int, seed: int) -> list[OperatorSpec]:
    """``count`` valid specifications; every operator comes up, with any of its types."""
    rng = np.random.default_rng(seed)
    names = sorted(lowered_operators())
    result: list[OperatorSpec] = []
    turn = 0
    while len(result) < count:
        name = str(rng.choice(_OFTEN)) if turn % 3 == 0 else names[(turn - turn // 3) % len(names)]
        turn += 1
        # Sizes may contradict each other, such as a window larger than its image.
        with contextlib.suppress(InvalidProgramError):
            result.append(make_operator(drawn_fields(name, rng)))
    return result


def _extent(rng: np.random.Generator, most: int = 512) -> int:
    """1 in a quarter of the cases, else spread over the powers of two."""
    return 1 if rng.random() < 0.25 else int(2 ** rng.uniform(0, np.log2(most)))


def drawn_fields(name: str, rng: np.random.Generator) -> dict[str, Any]:
    """Fields of an operator at random; some contradict each other."""
    fields: dict[str, Any] = {"operator": name, "dtype": str(rng.choice(lowered_operators()[name].dtypes))}
    if name == "conv2d":
        groups = _extent(rng, 16)
        fields |= {
            "direction": str(rng.choice(["fwd", "bwd_data", "bwd_weight"])),
            "n": _extent(rng, 32),
            "c_in": groups * _extent(rng, 16),
            "c_out": groups * _extent(rng, 16),
            "h": _extent(rng, 64),
            "w": _extent(rng, 64),
            "kh": _extent(rng, 7),
            "kw": _extent(rng, 7),
            "stride_h": _extent(rng, 4),
            "stride_w": _extent(rng, 4),
            "pad_h": int(rng.integers(0, 4)),
            "pad_w": int(rng.integers(0, 4)),
            "dil_h": _extent(rng, 3),
            "dil_w": _extent(rng, 3),
            "groups": groups,
        }
        fields["bias"] = fields["direction"] == "fwd" and bool(rng.random() < 0.3)
        if rng.random() < 0.4:
            fields["pad_h"] = fields["pad_w"] = 0
    elif name in ("linear", "bmm", "moe", "moe_w13", "grouped_gemm"):
        fields |= _product(name, fields["dtype"], rng)
    elif name.startswith("mla_"):
        fields |= {n: _extent(rng, 64) for n in ("batch", "q_len", "heads", "latent", "rope", "nope", "v_dim")}
        fields |= {"past_len": int(rng.integers(0, 3)) * _extent(rng), "hidden": _extent(rng), "q_latent": _extent(rng)}
        fields["kv_dtype"] = rng.choice(list(cache_dtypes(fields["dtype"])))
        fields["module"] = bool(rng.random() < 0.5)
        if fields["module"]:
            weight, scaling = rng.choice(np.array(list(projections(fields["dtype"])), dtype=object))
            fields |= {"weight_dtype": weight, "scaling": scaling}
    elif name == "attention_mixed":
        fields |= {n: _extent(rng, 64) for n in ("q_len", "past_len", "decodes", "decode_past_len", "kv_heads")}
        fields |= {"heads": fields["kv_heads"] * _extent(rng, 8), "head_dim": _extent(rng, 128)}
        fields["kv_dtype"] = rng.choice(list(cache_dtypes(fields["dtype"])))
    elif name == "rotary_embedding":
        depth = _extent(rng, 64)
        fields |= {"rows": _extent(rng), "head_dim": depth, "cols": depth * _extent(rng, 16)}
    elif name == "attention_backward":
        kv = _extent(rng, 8)
        fields |= {n: _extent(rng, 64) for n in ("batch", "q_len", "head_dim", "v_dim")}
        fields |= {"kv_heads": kv, "heads": kv * _extent(rng, 8), "causal": bool(rng.random() < 0.5)}
    elif name.startswith("attention"):
        kv = _extent(rng, 8)
        fields |= {
            "batch": _extent(rng, 16),
            "q_len": _extent(rng, 64),
            "past_len": int(rng.integers(0, 3)) * _extent(rng),
            "kv_heads": kv,
            "heads": kv * _extent(rng, 8) + int(rng.integers(0, 2)),
            "head_dim": _extent(rng, 128),
            "kv_dtype": rng.choice(list(cache_dtypes(fields["dtype"]))),
        }
    elif "pool" in name:
        fields |= {
            "n": _extent(rng, 8),
            "c": _extent(rng, 64),
            "h": _extent(rng, 64),
            "w": _extent(rng, 64),
            "kh": _extent(rng, 5),
            "kw": _extent(rng, 5),
            "stride_h": _extent(rng, 3),
            "stride_w": _extent(rng, 3),
            "pad_h": int(rng.integers(0, 3)),
            "pad_w": int(rng.integers(0, 3)),
        }
    else:
        for field, info in lowered_operators()[name].model_fields.items():
            if field == "inputs":
                fields[field] = int(rng.integers(2, 5))
            elif info.annotation is bool:
                fields[field] = bool(rng.random() < 0.5)
            elif field == "direction":
                fields[field] = str(rng.choice(["fwd", "bwd", "fwd_bwd"]))
            elif field not in ("operator", "dtype"):
                fields[field] = _extent(rng)
    return fields


def _product(name: str, dtype: str, rng: np.random.Generator) -> dict[str, Any]:
    experts = name not in ("linear", "bmm")
    weight, scaling = rng.choice(np.array(list(combinations(dtype, experts=experts)) or [(None, None)], dtype=object))
    fields: dict[str, Any] = {"weight_dtype": weight, "scaling": scaling}
    for field, info in lowered_operators()[name].model_fields.items():
        if info.annotation is bool:
            fields[field] = bool(rng.random() < 0.5)
        elif info.annotation is int:
            fields[field] = _extent(rng)
    if experts:
        fields["balance"] = str(rng.choice(BALANCES))
    if "topk" in fields:
        fields |= {"topk": _extent(rng, fields["experts"]), "tp": _extent(rng, fields["intermediate"])}
        fields["ep"] = _extent(rng, fields["experts"])
    return fields


def reads_only_padding(spec: OperatorSpec) -> bool:
    """Whether a gradient of the weights never meets the image: all that it multiplies is padding.

    TVM can prove such a condition false and drop the read; the class, whose condition depends on sizes,
    keeps it. Both are right, about a result of zeros.
    """
    if not isinstance(spec, Conv2d) or spec.direction != "bwd_weight" or spec.pad_h + spec.pad_w == 0:
        return False
    oh, ow = spec.output_hw()
    rows = _touches(oh, spec.stride_h, spec.kh, spec.dil_h, spec.pad_h, spec.h)
    return not (rows and _touches(ow, spec.stride_w, spec.kw, spec.dil_w, spec.pad_w, spec.w))


def _touches(outputs: int, stride: int, taps: int, dilation: int, pad: int, size: int) -> bool:
    """Whether output * stride + tap * dilation - pad ever lies in the image."""
    where = np.arange(outputs)[:, None] * stride + np.arange(taps) * dilation - pad
    return bool(((where >= 0) & (where < size)).any())
