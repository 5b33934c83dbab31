"""Jobs of a reading worker: convert a text to features or operator specifications."""

from __future__ import annotations

from typing import Any

import numpy as np
import safetensors.numpy

from cdmpp.errors import CdmppError, InvalidProgramError
from cdmpp.features.encode import encode_tvm_json
from cdmpp.predict.bulk import MAX_TOTAL
from cdmpp.programs.frontends.load import program_from_request
from cdmpp.programs.frontends.onnx_library import onnx_library_graph
from cdmpp_server.sandbox.frames import MAX_MESSAGE, MAX_NAME, ONNX_KIND, TIR_KINDS

Reply = tuple[dict[str, Any], bytes]


def run(header: dict[str, Any], payload: bytes) -> Reply:
    """Run one job; every error except a lack of memory becomes the reply.

    Raises MemoryError: the process is near its limit and should be replaced.
    """
    try:
        if header["kind"] in TIR_KINDS:
            return _tir(header, payload)
        if header["kind"] == ONNX_KIND:
            return _onnx(header, payload)
        raise ValueError(f"unknown kind of job: {header['kind']!r}")
    except CdmppError as error:
        return {"error": _error(error)}, b""
    except MemoryError:
        raise
    except Exception as error:
        # A parser that fails on invalid bytes has a bug, but the bytes are wrong as well: the client receives
        # an error of the program, and the service logs this line.
        return {"bug": f"{type(error).__name__}: {error}"[:MAX_MESSAGE]}, b""


def _error(error: CdmppError) -> dict[str, str]:
    return {"code": error.code, "message": error.message[:MAX_MESSAGE], "hint": error.hint[:MAX_MESSAGE]}


def _tir(header: dict[str, Any], payload: bytes) -> Reply:
    text = payload.decode("utf-8", "surrogatepass")
    program = program_from_request({header["kind"]: text}, header["backend"])
    if header.get("as_json"):
        return {}, (program.tvm_json or "").encode("utf-8", "surrogatepass")
    features = encode_tvm_json(program.tvm_json or "", program.function, schedule=True)
    if not (features.totals <= MAX_TOTAL).all():
        raise InvalidProgramError("the program's sizes overflow the features", hint="no loop nest of this size can run")
    arrays = {
        "leaves": np.ascontiguousarray(features.leaves),
        "positions": np.ascontiguousarray(features.positions),
        "totals": np.ascontiguousarray(features.totals),
    }
    reply = {"name": program.name[:MAX_NAME], "hash": program.hash, "dtype": features.dtype}
    return reply, safetensors.numpy.save(arrays)


def _onnx(header: dict[str, Any], payload: bytes) -> Reply:
    graph = onnx_library_graph(payload, header["dims"])
    if len(graph.programs) > header["max_programs"]:
        raise InvalidProgramError(
            f"the model has {len(graph.programs)} different programs",
            hint=f"at most {header['max_programs']} are allowed; split the model",
        )
    programs = [
        {"program": program.operator.model_dump(), "count": count}
        for program, count in zip(graph.programs, graph.counts, strict=True)
        if program.operator is not None
    ]
    unsupported = [
        {"operator": u.operator[:MAX_NAME], "count": u.count, "reason": u.reason[:MAX_MESSAGE]}
        for u in graph.unsupported
    ]
    return {"programs": programs, "unsupported": unsupported}, b""
