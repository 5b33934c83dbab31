"""Stored measurements: listed by the service, read by the clients, and adapted to by ``cdmpp adapt --observations``."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from cdmpp.cli.main import app
from cdmpp.client import AsyncPredictorClient, PredictorClient, operations
from cdmpp.devices import lookup
from cdmpp.errors import ServiceError
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp_server.operate.access import new_key
from tests.client.conftest import Serve
from tests.features.test_hostile_json import concrete

DEVICE = "l40s"
TEXTS = [f"linear:m={64 * i},n=1024,k=512,dtype=float16" for i in range(1, 13)]
KEY, KEY_HASH = new_key()
OTHER, OTHER_HASH = new_key()
ADMIN, ADMIN_HASH = new_key()


@pytest.fixture(scope="module")
def url(serve: Serve) -> str:
    keys = {"user": KEY_HASH, "other": OTHER_HASH}
    return serve(api_key_hashes=keys, admin_key_hashes={"boss": ADMIN_HASH}, propose_models=False)


@pytest.fixture(scope="module")
def client(url: str) -> Any:
    with PredictorClient(url, api_key=KEY) as client:
        yield client


def observe(client: PredictorClient, rounds: int, factor: float, seed: int, device: str = DEVICE) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(rounds):
        predictions = client.predict(TEXTS, device)
        scatter = np.exp(rng.normal(0, 0.02, len(TEXTS))).tolist()
        observed = client.observe(
            [(p, factor * e * (p.latency_s or 0)) for p, e in zip(predictions, scatter, strict=True)]
        )
        assert all(o.observation_id for o in observed), observed


def test_observations_are_listed_with_their_programs(client: PredictorClient, monkeypatch: pytest.MonkeyPatch) -> None:
    device = "a40"
    tir = json.dumps(concrete("linear:m=4,n=8,k=16"))
    client.observe(
        [
            (client.predict([TEXTS[0]], device)[0], 1e-3),
            {"program": TEXTS[1], "device": device, "latency_s": 2e-3, "protocol": "eager", "framework": "pytorch"},
            {"program": {"tvm_json": tir}, "device": device, "latency_s": 3e-3, "backend": "library"},
        ]
    )
    monkeypatch.setattr(operations, "_PAGE", 2)
    third, second, first = sorted(client.observations(device), key=lambda row: row["latency_s"], reverse=True)
    assert (first["latency_s"], first["program"]["m"], first["protocol"]) == (1e-3, 64, "kernel")
    assert (second["program"]["m"], second["protocol"], second["framework"]) == (128, "eager", "pytorch")
    assert third["program"] == {"tvm_json": tir} and third["backend"] == "library"
    for row in (first, second, third):
        assert row["device"] == device and row["device_digest"] == lookup(device).digest()
        assert row["lower_s"] <= row["predicted_s"] <= row["upper_s"]
    assert len(client.observations(device, most=2)) == 2
    assert client.observations(device, digest="0" * 16) == []
    assert client.observations("b200") == []
    ids = [row["observation_id"] for row in client.observations(device)]
    assert ids == sorted(ids, reverse=True), "newest first"


def test_users_list_their_own_observations_and_administrators_all(url: str, client: PredictorClient) -> None:
    observed = client.observations("a40")
    with PredictorClient(url, api_key=OTHER) as other, PredictorClient(url, api_key=ADMIN) as administrator:
        assert observed and other.observations("a40") == []
        assert administrator.observations("a40") == observed


def test_async_client_reads_the_same_observations(client: PredictorClient, url: str) -> None:
    async def read() -> list[dict[str, Any]]:
        async with AsyncPredictorClient(url, api_key=KEY) as client:
            return await client.observations("a40")

    assert asyncio.run(read()) == client.observations("a40")


def test_invalid_listing_is_refused(url: str, client: PredictorClient) -> None:
    for device, digest, path in (("a40", "nonsense", "digest"), ("a\0", None, "device")):
        with pytest.raises(ServiceError, match=path) as refused:
            client.observations(device, digest=digest)
        assert refused.value.status == 422 and refused.value.problem == "invalid_request"


@pytest.mark.slow
def test_model_is_adapted_to_observations_since_the_last_change(
    url: str, client: PredictorClient, tmp_path: Path
) -> None:
    observe(client, 10, 1.0, seed=0)
    observe(client, 5, 1.6, seed=1)
    out = tmp_path / "mine"
    arguments = ["adapt", "--observations", url, "--device", DEVICE, "--out", str(out)]
    refused = CliRunner().invoke(app, arguments)
    assert refused.exit_code == 1 and "key" in refused.stderr and not out.exists()
    result = CliRunner().invoke(app, [*arguments, "--json"], env={"CDMPP_API_KEY": KEY})
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["observations"]["read"] == 15 * len(TEXTS)
    assert abs(report["observations"]["before_change"] - 10 * len(TEXTS)) <= 2
    assert report["programs"] == len(TEXTS) and report["weight"] == 1
    assert report["cross_validated"]["after"] < 0.1 < report["cross_validated"]["before"]
    base, adapted = LatencyPredictor.load(), LatencyPredictor.load(out)
    for before, after in zip(*(m.predict(TEXTS, DEVICE) for m in (base, adapted)), strict=True):
        assert after.latency_s == pytest.approx(1.6 * (before.latency_s or 0), rel=0.1)
    text = CliRunner().invoke(app, [*arguments, "--api-key", KEY, "--last", "20"])
    assert "20 observations read, 0 of them from before the last change" in text.stdout, text.output


def test_impossible_requests_are_refused_in_one_line(url: str, tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "mine")]
    for arguments, code, message in (
        (["--observations", url, "--device", "b200"], 1, "no observations of this device"),
        (["--observations", url, "--device", "nonsense"], 1, "nonsense"),
        (["--observations", url], 2, "needs --device"),
        ([], 2, "one of --records and --observations"),
        (["--observations", url, "--records", "x.csv"], 2, "one of --records and --observations"),
    ):
        result = CliRunner().invoke(app, ["adapt", *arguments, *out], env={"CDMPP_API_KEY": KEY})
        assert result.exit_code == code and message in result.stderr, result.output
        assert not (tmp_path / "mine").exists()
