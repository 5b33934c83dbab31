"""Hostile requests for each endpoint, reproducible by seed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from benchmarks.fuzz import models, mutate, seeds

JSON, OCTETS, TENSORS = "application/json", "application/octet-stream", "application/vnd.safetensors"
#: Items of one request, where each is a case.
_ITEMS, _TEXTS = 64, 16
#: From 80 records on /adapt trains a network: a minute's work, which is no matter of reading.
MAX_RECORDS = 60


@dataclass(frozen=True)
class FuzzRequest:
    """A request to send, and its number of mutated inputs."""

    #: To be sent by POST.
    path: str
    media: str
    body: bytes
    #: Mutated inputs inside; a body that is refused as a whole counts as one.
    cases: int = 1


@dataclass(frozen=True)
class Surface:
    """One way in."""

    name: str
    #: Path in the published schema; a service without it is not tested.
    path: str
    #: Part of all cases.
    share: float
    #: ``make(rng)``: the next request.
    make: Callable[[random.Random], FuzzRequest]
    #: Time for an answer where the service's deadline does not hold.
    limit_s: float | None = None


def _items(rng: random.Random) -> FuzzRequest:
    """Items that fit the schema and make no sense: sizes, names and figures of any value."""
    items = []
    for item in seeds.predict_body(_ITEMS)["items"]:
        item["program"] = dict(rng.choice(seeds.operators()))
        target = item["device"] if isinstance(item["device"], dict) and rng.random() < 0.5 else item["program"]
        for _ in range(rng.choice((1, 1, 2))):
            wild = mutate.scalar(rng)
            if rng.random() < 0.4:  # of a size that may be meant: these are computed
                wild = rng.randrange(1, 2 ** rng.randrange(2, 22))
            if rng.random() < 0.8:
                target[rng.choice([key for key in target if key != "operator"])] = wild
            else:
                target[str(wild)[:60]] = mutate.scalar(rng) if rng.random() < 0.5 else 1
        if rng.random() < 0.1:
            item["device"] = str(mutate.scalar(rng))[:200]
        # The schema bounds a field's text; one item beyond it would refuse the others with it.
        item["program"] = {k: v[:200] if isinstance(v, str) else v for k, v in item["program"].items()}
        items.append(item)
    body = json.dumps({"items": items}).encode("utf-8", "replace")
    return FuzzRequest("/predict", JSON, body, len(items))


def _body(path: str, make: Callable[[], dict[str, Any]]) -> Callable[[random.Random], FuzzRequest]:
    def mutated(rng: random.Random) -> FuzzRequest:
        return FuzzRequest(path, JSON, mutate.dumps(rng, mutate.json_value(rng, make())))

    return mutated


def _registered() -> dict[str, Any]:
    return {"programs": [dict(program) for program in seeds.operators()[:3]]}


def _bytes(rng: random.Random) -> FuzzRequest:
    bodies = {"/predict": seeds.predict_body, "/curve": seeds.curve_body, "/observe": seeds.observe_body}
    path, make = rng.choice((*bodies.items(), ("/programs", _registered)))
    data = json.dumps(make()).encode()
    changed = mutate.tokens(rng, data) if rng.random() < 0.5 else mutate.octets(rng, data)
    return FuzzRequest(path, JSON, changed)


def _features(rng: random.Random) -> FuzzRequest:
    if rng.random() < 0.3:
        return FuzzRequest("/predict", TENSORS, mutate.octets(rng, seeds.feature_body()))
    return FuzzRequest("/predict", TENSORS, mutate.tensors(rng, seeds.feature_body()))


def _tvm_json(rng: random.Random) -> FuzzRequest:
    texts = []
    for _ in range(_TEXTS):
        document = rng.choice(seeds.tir_documents())
        if rng.random() < 0.5:
            nodes = document["nodes"]
            changed = {**document, "nodes": [dict(node) for node in nodes]}
            for _ in range(rng.choice((1, 1, 2, 5))):
                _rewire(rng, changed["nodes"])
            text = json.dumps(changed)
        elif rng.random() < 0.7:
            text = json.dumps(mutate.json_value(rng, document))
        else:
            change = mutate.tokens if rng.random() < 0.5 else mutate.octets
            text = change(rng, json.dumps(document).encode()).decode("utf-8", "replace")
        texts.append({"tvm_json": text})
    return _programs(rng, texts)


def _rewire(rng: random.Random, nodes: list[dict[str, Any]]) -> None:
    """A reference that leads elsewhere, also in circles; a number or a kind of another size or type."""
    node = rng.choice(nodes)
    data = node.get("data")
    if isinstance(data, dict) and data:
        data = node["data"] = dict(data)
        data[rng.choice(list(data))] = rng.randrange(-2, len(nodes) + 2) if rng.random() < 0.8 else mutate.value(rng)
    elif isinstance(data, list) and data:
        data = node["data"] = list(data)
        data[rng.randrange(len(data))] = rng.randrange(-2, len(nodes) + 2)
        if rng.random() < 0.1:
            data *= 50
    elif rng.random() < 0.5:
        node["data"] = mutate.scalar(rng)
    else:
        node["type"] = rng.choice(nodes)["type"]


def _tvmscript(rng: random.Random) -> FuzzRequest:
    texts = (mutate.lines(rng, rng.choice(seeds.SCRIPTS), seeds.HOSTILE_LINES) for _ in range(_TEXTS))
    return _programs(rng, [{"tvmscript": text.encode("utf-8", "replace").decode()} for text in texts])


def _programs(rng: random.Random, texts: list[dict[str, str]]) -> FuzzRequest:
    items = [{"program": text, "device": rng.choice(seeds.DEVICES)} for text in texts]
    return FuzzRequest("/predict", JSON, json.dumps({"items": items}).encode(), len(items))


def _onnx(rng: random.Random) -> FuzzRequest:
    query = "device=t4"
    if rng.random() < 0.2:
        name = rng.choice(("device", "dim", "protocol", "model", "x"))
        query += f"&{name}={quote(str(mutate.scalar(rng))[:100])}"
    return FuzzRequest(f"/models/predict?{query}", OCTETS, models.onnx_case(rng))


def _adapt(rng: random.Random) -> FuzzRequest:
    body = mutate.json_value(rng, seeds.adapt_body())
    if isinstance(body, dict) and isinstance(body.get("records"), list):
        body["records"] = body["records"][:MAX_RECORDS]
    return FuzzRequest("/adapt", JSON, mutate.dumps(rng, body))


def _plan(rng: random.Random) -> FuzzRequest:
    path, body = rng.choice(seeds.plan_bodies())
    return FuzzRequest(path, JSON, mutate.dumps(rng, mutate.json_value(rng, body)))


SURFACES = (
    Surface("operator items", "/predict", 0.35, _items),
    Surface("bodies of /predict", "/predict", 0.10, _body("/predict", seeds.predict_body)),
    Surface("JSON as bytes", "/predict", 0.06, _bytes),
    Surface("binary bodies", "/predict", 0.05, _features),
    Surface("TVM JSON", "/predict", 0.16, _tvm_json),
    Surface("TVMScript", "/predict", 0.06, _tvmscript),
    Surface("ONNX", "/models/predict", 0.10, _onnx),
    Surface("bodies of /curve", "/curve", 0.03, _body("/curve", seeds.curve_body)),
    Surface("bodies of /llm", "/llm", 0.03, _body("/llm", seeds.llm_body)),
    Surface("bodies of /observe", "/observe", 0.03, _body("/observe", seeds.observe_body)),
    Surface("bodies of /programs", "/programs", 0.02, _body("/programs", _registered)),
    Surface("bodies of plans", "/replay", 0.03, _plan),
    # Adapting is work, not an answer: it takes as long as it takes.
    Surface("bodies of /adapt", "/adapt", 0.01, _adapt, limit_s=60.0),
)
