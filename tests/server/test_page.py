"""The page in a real browser, on the real service: it shows the values of the API."""

import csv
import http.client
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from cdmpp.cli.demo import Server, running_server
from cdmpp.llm.engines.profile import engine_names
from cdmpp.predict.curves.template import Expression, exact
from cdmpp.programs.operators import operator_types, parse_operator
from cdmpp.utils.units import format_latency
from cdmpp_server.llm import LlmRequest
from cdmpp_server.page import FOLDER, SWAGGER, files
from tests.server.conftest import LINEAR, problem
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
TEXT = "3 × linear:m=512,n=4096,k=1024,dtype=float16\nsoftmax:rows=4096,cols=1024"
DEVICES = ["t4", "l4", "v100-pcie-32gb"]
#: Fragment with a small initial query; without it the page predicts a layer on seven devices.
SMALL = "#text=relu:rows%3D64,cols%3D64&devices=t4&protocol=eager&framework=pytorch"


def test_page_loads_from_this_server_only(client: TestClient) -> None:
    answer = client.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
    again = client.get("/", headers={"if-none-match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert client.head("/").content == b""
    for name, (content, _) in files().items():
        assert client.get(f"/page/{name}").content == content
        if name in {path.name for path in SWAGGER}:
            continue  # the browser test of /docs shows that they load nothing
        addresses = set(re.findall(rb"(?:https?:)?//[a-z][^\s\"')]*\.[^\s\"')]*", content))
        assert addresses <= {b"http://www.w3.org/2000/svg"}, name
    assert b"style=" not in files()["index.html"][0]


@pytest.mark.parametrize("name", ["__init__.py", "nothing.js", "..%2Fsettings.py", "%2Fetc%2Fpasswd", "%00"])
def test_other_files_are_not_served(client: TestClient, name: str) -> None:
    problem(client.get(f"/page/{name}"), 404, "not_found")
    assert (FOLDER / "__init__.py").exists()


def test_page_refuses_post(client: TestClient) -> None:
    answer = client.post("/", content=b"x")
    problem(answer, 405, "method_not_allowed")
    assert "GET" in answer.headers["allow"]


def test_page_has_the_example_configurations_and_the_options_of_llm(client: TestClient) -> None:
    answer = client.get("/page/models.json")
    assert answer.headers["content-type"] == "application/json"
    examples = {path.stem: json.loads(path.read_text()) for path in (EXAMPLES / "llm").glob("*.json")}
    assert answer.json() == examples
    form = files()["index.html"][0].decode()
    selects = dict(re.findall(r'<select [^>]*data-field="(\w+)"[^>]*>(.*?)</select>', form, re.DOTALL))
    options = {name: re.findall("<option>(.*?)</option>", text) for name, text in selects.items()}
    assert sorted(options["engine"]) == sorted(engine_names())
    fields = LlmRequest.model_json_schema()["properties"]
    for name in ("weights", "kv_dtype"):
        assert options[name] == fields[name]["anyOf"][0]["enum"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CDMPP_DATABASE", str(tmp_path_factory.mktemp("page") / "service.sqlite"))
        with running_server() as server:
            yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next((program for name in names if (program := shutil.which(name))), None)
    if path is None:
        pytest.skip("needs a browser: chromium or google-chrome on the path")
    with playwright.sync_playwright() as engine:
        browser = engine.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        yield browser
        browser.close()


@pytest.fixture
def opened(server: Server, browser: Any) -> Iterator[Callable[..., Any]]:
    """Open the page; afterwards there was no error and no request to anywhere else."""
    pages: list[Any] = []
    wrong: list[str] = []
    origin = f"http://127.0.0.1:{server.port}/"

    def open_(width: int = 1280, fragment: str = SMALL, quiet: bool = True, **context: Any) -> Any:
        page = browser.new_context(viewport={"width": width, "height": 800}, **context).new_page()
        pages.append(page)
        page.set_default_timeout(20_000)
        page.on("request", lambda r: None if r.url.startswith((origin, f"blob:{origin}")) else wrong.append(r.url))
        page.on("pageerror", lambda e: wrong.append(str(e)))
        if quiet:
            page.on("console", lambda m: wrong.append(m.text) if m.type in ("error", "warning") else None)
        page.goto(origin + fragment)
        page.wait_for_selector("#bars svg")
        settled(page)
        return page

    yield open_
    for page in pages:
        page.context.close()
    assert wrong == []


def settled(page: Any) -> None:
    """Wait for the answer and its curve."""
    page.wait_for_selector("#go:text-is('Predict')")


def choose(page: Any, devices: list[str] = DEVICES, text: str | None = None) -> None:
    page.get_by_role("button", name="None").click()
    for device in devices:
        page.locator(f"input[name=device][value={device}]").check()
    if text is not None:
        page.get_by_label("One operator per line").fill(text)
        page.get_by_role("button", name="Predict").click()
        settled(page)


def shown(page: Any, table: str, key: str) -> dict[str, str]:
    """Column of a table by device."""
    rows = page.locator(f"{table} tr[data-device]").all()
    return {r.get_attribute("data-device"): r.locator(f"[data-key={key}]").text_content() for r in rows}


@pytest.mark.browser
def test_operators_show_the_values_of_predict(server: Server, opened: Callable[..., Any]) -> None:
    page = opened()
    choose(page, text=TEXT)
    page.get_by_text("Values as table", exact=True).click()
    counts = {"linear": 3, "softmax": 1}
    programs = [parse_operator(line.split("× ")[-1]).canonical() for line in TEXT.splitlines()]
    question = {"protocol": "eager", "framework": "pytorch"}
    items = [{"program": p, "device": d, **question} for d in DEVICES for p in programs]
    results = server.request("POST", "/predict", {"items": items})["results"]
    totals = {d: 0.0 for d in DEVICES}
    for result in results:
        totals[result["device"]] += counts[result["name"].partition(":")[0]] * result["latency_s"]
    assert shown(page, "#bars-table", "latency") == {d: format_latency(t) for d, t in totals.items()}
    domains = {d: {r["domain"] for r in results if r["device"] == d} for d in DEVICES}
    best = min(totals, key=lambda d: ("out" in domains[d], "near" in domains[d], totals[d]))
    assert page.locator("#fastest").text_content() == format_latency(totals[best])
    # The same figures stand in the picture, and a unit that is chosen holds for both.
    for device, total in totals.items():
        assert (
            page.locator("#bars .row", has_text=device)
            .locator(".value")
            .text_content()
            .startswith(format_latency(total))
        )
    page.locator("#unit").select_option("ms")
    assert all(text.endswith(" ms") for text in shown(page, "#bars-table", "latency").values())
    # Where the time goes on another device than the fastest.
    page.locator("#unit").select_option("auto")
    page.locator("#device").select_option("l4")
    for result in results:
        if result["device"] == "l4":
            row = page.locator(f"tr[data-program^='{result['name'].partition(':')[0]}']")
            assert row.locator("[data-key=each]").text_content() == format_latency(result["latency_s"])
            assert result["domain"] in row.inner_text()


@pytest.mark.browser
def test_curve_shows_the_values_of_curve(server: Server, opened: Callable[..., Any]) -> None:
    page = opened()
    lines = ["tokens = 256", "linear:m=tokens*2,n=1024,k=1024,dtype=float16", "add:rows=tokens,cols=1024"]
    choose(page, text="\n".join(lines))
    assert page.locator("#axis").input_value() == "tokens"
    body = {
        "programs": [
            {"program": {"operator": "linear", "m": "tokens*2", "n": 1024, "k": 1024, "dtype": "float16"}},
            {"program": {"operator": "add", "rows": "tokens", "cols": 1024}},
        ],
        "axes": {"tokens": [256, 1024]},
        "devices": DEVICES,
        "protocol": "eager",
        "framework": "pytorch",
    }
    points = server.request("POST", "/curve", body)["points"]
    for tokens in (256, 1024):
        here = {p["device"]: format_latency(p["latency_s"]) for p in points if p["at"] == {"tokens": tokens}}
        assert shown(page, "#readout", "latency") == here
        assert page.locator("#at-label").text_content() == f"tokens = {tokens}"
        page.locator("#at").press("ArrowRight")
        page.locator("#at").press("ArrowRight")
    drawn = page.locator("#curve path.line")
    assert drawn.count() == len(DEVICES)
    page.get_by_role("button", name="t4").press("Space")
    assert drawn.count() == len(DEVICES) - 1


@pytest.mark.browser
def test_onnx_file_shows_the_values_of_models_predict(server: Server, opened: Callable[..., Any]) -> None:
    page = opened()
    choose(page)
    page.set_input_files("#file", str(EXAMPLES / "transformer_block.onnx"))
    page.wait_for_selector("caption:has-text('programs on')")
    page.wait_for_selector("#curve-note:has-text('is fixed')")
    settled(page)
    query = "&".join(["protocol=eager", "framework=pytorch", *(f"device={d}" for d in DEVICES)])
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    connection.request(
        "POST",
        f"/models/predict?{query}",
        (EXAMPLES / "transformer_block.onnx").read_bytes(),
        {"content-type": "application/octet-stream"},
    )
    answer = json.loads(connection.getresponse().read())
    connection.close()
    totals = {d["device"]: format_latency(d["latency_s"]) for d in answer["devices"]}
    page.get_by_text("Values as table", exact=True).click()
    assert shown(page, "#bars-table", "latency") == totals
    for device in DEVICES:
        page.locator("#device").select_option(device)
        costs = []
        for program in answer["programs"]:
            latency_s = next(a for a in program["answers"] if a["device"] == device)["latency_s"]
            row = page.locator(f'tr[data-program="{program["name"]}"]')
            assert row.locator("[data-key=each]").text_content() == format_latency(latency_s)
            costs.append((program["count"] * latency_s, program["name"]))
        names = [r.get_attribute("data-program") for r in page.locator("tr[data-program]").all()]
        assert names == [name for _, name in sorted(costs, reverse=True)][: len(names)]


@pytest.mark.browser
def test_dynamic_batch_has_a_field_and_a_curve(opened: Callable[..., Any], tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="needs onnx")
    float32, info = onnx.TensorProto.FLOAT, onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [info("x", float32, ["batch", 64]), info("w", float32, [64, 64])],
        [info("y", float32, ["batch", 64])],
        [onnx.helper.make_tensor("w", float32, [64, 64], [0.0] * 4096)],
    )
    path = tmp_path / "dynamic.onnx"
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)]), path)
    page = opened()
    choose(page, ["t4"])
    page.set_input_files("#file", str(path))
    page.wait_for_selector("#curve-title:has-text('Latency over batch')")
    page.wait_for_selector("#curve path.line", state="attached")  # flat, so without a height
    page.get_by_label("batch", exact=True).fill("24")
    page.get_by_role("button", name="Predict").click()
    page.wait_for_selector("#at-label:has-text('batch = 24')")
    assert "m=24" in page.locator("#programs").inner_text()
    assert page.locator("#curve .mark").count() == 8


@pytest.mark.browser
def test_mistakes_give_messages(opened: Callable[..., Any], tmp_path: Path) -> None:
    page = opened()
    choose(page, text="linear:m=512,n=4096\nconv3d:n=1\nadd:rows=x,cols=4\nsoftmax:rows=4,cols=4")
    faults = page.locator("#text-faults").inner_text()
    assert "line 1: linear also needs k" in faults
    assert 'line 2: there is no operator "conv3d"' in faults
    assert "line 3: " in faults and "x has no value" in faults
    assert "1 program on" in page.locator("#programs").inner_text()
    # What only the service knows comes back as its message and hint.
    choose(page, text="conv2d:n=1,c_in=3,h=2,w=2,c_out=4,kh=7,kw=7")
    assert "larger than the padded input" in page.locator("#headline").inner_text()
    assert "enlarge h, w or the padding" in page.locator("#programs").inner_text()
    choose(page, [], text=TEXT)
    assert "No device is selected" in page.locator("#alert").inner_text()
    damaged = tmp_path / "damaged.onnx"
    damaged.write_bytes(b"not a model")
    page.set_input_files("#file", str(damaged))
    page.locator(f"input[name=device][value={DEVICES[0]}]").check()
    page.get_by_role("button", name="Predict").click()
    page.wait_for_selector("#alert:has-text('damaged.onnx is not an ONNX file')")


@pytest.mark.browser
def test_names_are_not_parsed_as_markup(opened: Callable[..., Any]) -> None:
    page = opened()
    choose(page, text="linear:m=1,n=1,k=1,dtype=<img src=x onerror=alert(1)>")
    assert page.locator("#results img").count() == 0


@pytest.mark.browser
def test_missing_endpoint_gives_a_message(opened: Callable[..., Any]) -> None:
    page = opened(quiet=False)
    page.route("**/curve", lambda route: route.fulfill(status=404, body="nothing here"))
    choose(page, text=TEXT)
    page.wait_for_selector("#curve-note:has-text('This service has no /curve')")
    assert page.locator("#bars .row").count() == len(DEVICES)
    page.route("**/predict", lambda route: route.abort())
    page.get_by_role("button", name="Predict").click()
    page.wait_for_selector("#alert:has-text('The service did not respond')")


@pytest.mark.browser
def test_page_requests_a_key_and_uses_it(opened: Callable[..., Any]) -> None:
    page = opened(quiet=False)

    def guarded(route: Any) -> None:
        if route.request.headers.get("authorization") == "Bearer sesame":
            route.fallback()
        else:
            route.fulfill(status=401, json={"code": "unauthorized", "detail": "this needs a key", "status": 401})

    page.route(re.compile("/(support|devices|predict|curve)$"), guarded)
    page.reload()
    page.wait_for_selector("#alert:has-text('requires an API key')")
    page.locator("#key").fill("sesame")
    page.locator("#key").press("Enter")
    page.wait_for_selector("#bars svg")
    settled(page)
    assert page.locator("#alert").is_hidden()


@pytest.mark.browser
def test_too_large_file_gives_a_message(opened: Callable[..., Any], tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="needs onnx")
    weights = onnx.helper.make_tensor("w", onnx.TensorProto.FLOAT, [5_000_000], bytes(20_000_000), raw=True)
    graph = onnx.helper.make_graph([], "g", [], [], [weights])
    path = tmp_path / "large.onnx"
    onnx.save(onnx.helper.make_model(graph), path)
    page = opened(quiet=False)
    page.set_input_files("#file", str(path))
    page.wait_for_selector("#alert:has-text('max_body_bytes')")


@pytest.mark.browser
def test_language_model_shows_the_values_of_llm(server: Server, opened: Callable[..., Any], tmp_path: Path) -> None:
    page = opened(permissions=["clipboard-read", "clipboard-write"])
    devices = ["h100-sxm", "a100-pcie-80gb", "t4"]
    page.get_by_role("radio", name="Language model").check()
    choose(page, devices)
    page.get_by_label("Answer tokens").fill("16")
    page.get_by_label("tp", exact=True).fill("2")
    page.get_by_label("Example model").select_option("qwen2.5-14b")
    page.wait_for_selector("#workload:has-text('14.8 billion')")
    settled(page)
    config = json.loads((EXAMPLES / "llm" / "qwen2.5-14b.json").read_text())
    question = {"config": config, "devices": devices, "batch": 8, "input": 1024, "output": 16, "tp": 2}
    *answers, failure = server.request("POST", "/llm", question)["answers"]
    rows = {d: page.locator(f".estimates tr[data-device='{d}']") for d in devices}
    for answer in answers:
        cell = {key: rows[answer["device"]].locator(f"[data-key={key}]") for key in ("ttft", "tpot", "memory", "gpus")}
        for key in ("ttft", "tpot"):
            assert cell[key].text_content().startswith(format_latency(answer[f"{key}_s"]) + "[")
        assert cell["memory"].text_content().startswith(f"{answer['memory_bytes']['total'] / 1e9:.3g} GB")
        assert cell["gpus"].text_content() == "2"
    assert failure["error"]["code"] == "infeasible"
    assert failure["error"]["message"] in rows["t4"].inner_text()
    assert failure["error"]["hint"] in rows["t4"].inner_text()
    # The parts of the selected device, and another duration in the bars.
    page.locator("#device").select_option("h100-sxm")
    largest = max(answers[0]["parts"], key=lambda part: part["seconds"])
    first = page.locator("tr[data-program]").first
    assert first.get_attribute("data-program") == f"{largest['name']}:{largest['phase']},{largest['operator']}"
    assert first.locator("[data-key=total]").text_content() == format_latency(largest["seconds"])
    page.locator("#duration").select_option("ttft")
    bar = page.locator("#bars .row", has_text="h100-sxm").locator(".value")
    assert bar.text_content() == format_latency(answers[0]["ttft_s"])
    with page.expect_download() as download:
        page.locator("[data-figure=bars]").get_by_text("CSV", exact=True).click()
    exported = {row["device"]: row for row in csv.DictReader(Path(download.value.path()).read_text().splitlines())}
    assert set(exported) == set(devices)
    assert float(exported["h100-sxm"]["tpot_s"]) == answers[0]["tpot_s"]
    assert exported["t4"]["error"] == failure["error"]["message"]
    # A link has the example's name, or a short configuration; a long one is not part of it.
    assert "model=qwen2.5-14b" in page.url and "config=" not in page.url
    other = opened(fragment=f"#{page.url.partition('#')[2]}")
    assert other.get_by_label("tp", exact=True).input_value() == "2"
    assert other.locator(".estimates").inner_text() == page.locator(".estimates").inner_text()
    for extra, held in (({"n": 1}, True), ({"n": "x" * 2000}, False)):
        path = tmp_path / "config.json"
        path.write_text(json.dumps({**config, "num_hidden_layers": 4, **extra}))
        page.set_input_files("#config-file", str(path))
        page.wait_for_function("held => location.href.includes('config=') === held", arg=held)
        settled(page)
        assert page.get_by_label("Example model").input_value() == ""
        page.get_by_role("button", name="Copy a link to this view").click()
        page.wait_for_selector("#link-note:text-is('Copied.')" if held else "#link-note:has-text('config.json')")
    page.get_by_role("textbox", name="config.json").fill("{")
    page.get_by_role("button", name="Predict").click()
    page.wait_for_selector("#alert:has-text('config.json is not a JSON object')")


@pytest.mark.browser
def test_load_chart_shows_the_values_of_simulate(server: Server, opened: Callable[..., Any]) -> None:
    devices = ["h100-sxm", "l4"]
    fragment = "#mode=llm&load=serving&sequences=6&output=16&model=llama-3.1-8b&devices="
    page = opened(fragment=fragment + ",".join(devices))
    page.wait_for_selector("#curve path.line")
    config = json.loads((EXAMPLES / "llm" / "llama-3.1-8b.json").read_text())
    for concurrency in (6, 4):
        assert page.locator("#at-label").text_content() == f"concurrency = {concurrency}"
        question = {"config": config, "concurrency": concurrency, "input": 1024, "output": 16}
        answers = {d: server.request("POST", "/llm/simulate", {**question, "device": d}) for d in devices}
        for key in ("tpot", "ttft"):
            means = {d: format_latency(answer[f"{key}_s"]["mean"]) for d, answer in answers.items()}
            assert shown(page, "#readout", key) == means
            if concurrency == 6:
                cells = shown(page, ".estimates", key)
                assert all(cells[d].startswith(mean + "[") for d, mean in means.items())
        page.locator("#at").press("ArrowLeft")
    assert page.locator("#curve path.line").count() == 2
    assert page.locator("#curve path.mark").count() == 2 * len([1, 2, 4, 6])
    assert page.locator("#curve path.mark.chosen").count() == 2
    with page.expect_download() as download:
        page.locator("[data-figure=curve]").get_by_text("CSV", exact=True).click()
    exported = list(csv.DictReader(Path(download.value.path()).read_text().splitlines()))
    assert [int(row["concurrency"]) for row in exported] == [1, 2, 4, 6] * 2


@pytest.mark.browser
def test_old_results_are_hidden_below_an_error_and_in_another_mode(opened: Callable[..., Any]) -> None:
    page = opened(quiet=False)
    bars = page.locator("#bars")
    page.get_by_role("radio", name="Language model").check()
    assert bars.is_hidden() and page.locator("#curve-part").is_hidden() and page.locator("#headline").is_hidden()
    page.get_by_role("radio", name="Operators").check()
    assert bars.is_visible()
    page.route("**/predict", lambda route: route.fulfill(status=500, json={"detail": "it broke", "hint": "ask again"}))
    page.get_by_role("button", name="Predict").click()
    page.wait_for_selector("#alert:has-text('it broke. Hint: ask again.')")
    assert bars.is_hidden() and page.locator("#headline").is_hidden()
    page.unroute("**/predict")
    # An item that fails has neither bars nor their legend.
    choose(page, text="conv2d:n=1,c_in=3,h=2,w=2,c_out=4,kh=7,kw=7")
    assert page.locator("#headline").is_visible() and page.locator("#alert").is_hidden()
    assert page.locator("#bars-key").is_hidden() and page.locator("#domains").inner_text() == ""


@pytest.mark.browser
def test_device_without_an_answer_does_not_hide_the_others(opened: Callable[..., Any]) -> None:
    page = opened(quiet=False, fragment="#mode=llm&load=serving&sequences=2&output=8&devices=h100-sxm,l4,t4")
    devices: list[list[str]] = []

    def answered(route: Any) -> None:
        body = json.loads(route.request.post_data)
        devices.append(body["devices"] if "devices" in body else [body["device"]])
        if body.get("devices") == ["l4"] or body.get("device") == "l4":
            return route.fulfill(status=504, json={"detail": "the deadline passed", "hint": "send less"})
        if len(devices) == 1:
            return route.fulfill(status=503, headers={"Retry-After": "1"}, json={"detail": "busy"})
        return route.fallback()

    page.route("**/llm", answered)
    page.route("**/llm/simulate", answered)
    page.get_by_label("Example model").select_option("llama-3.1-8b")
    page.wait_for_selector("#curve path.line")
    settled(page)
    assert all(len(names) == 1 for names in devices)
    row = page.locator(".estimates tr[data-device=l4]").inner_text()
    assert "the deadline passed." in row and "Hint: send less." in row
    assert page.locator(".estimates tr[data-device=h100-sxm] [data-key=tpot]").count() == 1


@pytest.mark.browser
def test_percentiles_goals_and_a_rate_are_shown(server: Server, opened: Callable[..., Any]) -> None:
    fragment = "#mode=llm&load=rate&rate=1.5&output=8&ttft_goal=1000&tpot_goal=0.1&devices=h100-sxm&model=llama-3.1-8b"
    page = opened(fragment=fragment)
    page.wait_for_selector("#curve path.line")
    settled(page)
    config = json.loads((EXAMPLES / "llm" / "llama-3.1-8b.json").read_text())
    question = {"config": config, "device": "h100-sxm", "rate": 1.5, "input": 1024, "output": 8}
    answer = server.request("POST", "/llm/simulate", question)
    for key, kept in (("ttft", "goal 1.00 s kept"), ("tpot", "goal 100 µs missed")):
        cell = page.locator(f".estimates [data-key={key}]").inner_text()
        p50, p99 = (format_latency(answer[f"{key}_s"][end]) for end in ("p50", "p99"))
        assert all(text in cell for text in (f"p50 {p50}", f"p99 {p99}", kept))
        assert shown(page, "#readout", f"{key}-p99") == {"h100-sxm": p99}
    assert page.locator("#at-label").text_content() == "requests per second = 1.5"
    assert page.locator("#curve path.mark").count() == 4


@pytest.mark.browser
def test_image_networks_have_a_warning(opened: Callable[..., Any]) -> None:
    page = opened()
    for name, warned in (("small_resnet", True), ("transformer_block", False)):
        page.set_input_files("#file", str(EXAMPLES / f"{name}.onnx"))
        page.wait_for_selector(f"#drop-text:has-text('{name}')")
        settled(page)
        page.wait_for_selector("caption:has-text('programs on')")
        assert ("27 to 44 %" in page.locator("#remarks").inner_text()) == warned


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_narrow_screen_needs_no_horizontal_scrolling(opened: Callable[..., Any], scheme: str, tmp_path: Path) -> None:
    page = opened(360, "", color_scheme=scheme, has_touch=True)
    for upload in (None, EXAMPLES / "small_resnet.onnx"):
        if upload is not None:
            page.set_input_files("#file", str(upload))
            page.wait_for_selector("caption:has-text('23 programs')")
        widths = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
        assert widths == [360, 360]
    page.screenshot(path=tmp_path / "phone.png", full_page=True)
    assert (tmp_path / "phone.png").stat().st_size > 20_000
    assert page.evaluate(CONTRAST) == []
    page = opened(360, "#mode=llm&load=serving&sequences=2&output=4&devices=h100-sxm,t4", color_scheme=scheme)
    page.wait_for_selector("#curve path.line")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert page.evaluate(CONTRAST) == []


#: Texts with less than 4.5:1 to the ground behind them.
CONTRAST = """() => {
  const channels = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
  const light = (c) => c.slice(0, 3).map((v) => v / 255)
    .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const colour = channels(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] > 0.9) return colour;
    }
    return [255, 255, 255];
  };
  const weak = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((c) => c.nodeType === 3 && c.data.trim());
    if (!own || !node.checkVisibility() || node.closest("noscript, .hidden, .skip, option")) continue;
    const style = getComputedStyle(node), svg = node instanceof SVGElement;
    if (svg && !["text", "tspan"].includes(node.localName)) continue;
    const pair = [light(channels(svg ? style.fill : style.color)), light(ground(node))].sort();
    const ratio = (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
    if (ratio < 4.5) weak.push(`${node.localName}.${node.getAttribute("class")} ${ratio.toFixed(2)}`);
  }
  return [...new Set(weak)];
}"""


@pytest.mark.browser
def test_headline_prefers_devices_in_domain_and_names_the_domain(opened: Callable[..., Any]) -> None:
    page = opened()
    # b200 is the fastest and was not trained with this operator.
    choose(page, ["b200", "t4", "v100-pcie-32gb"], text="softmax:rows=4096,cols=1024,dtype=float32")
    marks = {
        r.get_attribute("data-device"): r.locator("td").nth(2).text_content()
        for r in page.locator("#bars-table tr[data-device]").all()
    }
    assert {"in", "out"} <= {mark.split()[-1] for mark in marks.values()} or "near" in str(marks)
    headline = page.locator("#headline").inner_text()
    named = re.search(r" on (\S+) . (in|near|out) ", headline)
    assert named is not None, headline
    order = ["in", "near", "out"]
    assert named[2] == min((mark.split()[-1] for mark in marks.values()), key=order.index)
    assert marks[named[1]].split()[-1] == named[2]
    legend = page.locator("#domains").inner_text()
    assert all(f" {mark.split()[-1]}: " in legend for mark in marks.values())


@pytest.mark.browser
def test_defaults_are_those_of_the_other_interfaces(server: Server, opened: Callable[..., Any]) -> None:
    page = opened(fragment="")
    assert page.locator("#protocol").input_value() == server.request("GET", "/support")["default_protocol"]
    assert page.locator("#framework").input_value() == ""
    rows = page.evaluate("""() => {
      const list = document.getElementById("devices"), seen = list.getBoundingClientRect();
      return [...list.children].filter((row) => row.getBoundingClientRect().bottom <= seen.bottom + 1).length;
    }""")
    assert rows >= 10
    marks = page.locator("#legend button path.mark").evaluate_all(
        "nodes => nodes.map((node) => node.getAttribute('d'))"
    )
    assert len(marks) == len(set(marks)) == 7


@pytest.mark.browser
def test_figures_are_exported_and_a_link_shows_the_same_view(opened: Callable[..., Any], tmp_path: Path) -> None:
    page = opened(permissions=["clipboard-read", "clipboard-write"])
    choose(page, text="tokens = 256\nlinear:m=tokens,n=1024,k=1024,dtype=float16\nadd:rows=tokens,cols=1024")
    page.wait_for_selector("#curve path.line")
    for figure in ("bars", "curve"):
        exported = {}
        for kind in ("CSV", "JSON", "PNG"):
            with page.expect_download() as download:
                page.locator(f"[data-figure={figure}]").get_by_text(kind, exact=True).click()
            assert download.value.suggested_filename == f"cdmpp-{figure}.{kind.lower()}"
            exported[kind] = Path(download.value.path()).read_bytes()
        rows = list(csv.DictReader(exported["CSV"].decode().splitlines()))
        assert {row["device"] for row in rows} == set(DEVICES)
        assert all(float(row["lower_s"]) <= float(row["latency_s"]) <= float(row["upper_s"]) for row in rows)
        values = json.loads(exported["JSON"])
        assert values["query"]["protocol"] == "eager"
        if figure == "bars":
            assert {d["device"]: d["latency_s"] for d in values["devices"]} == {
                row["device"]: float(row["latency_s"]) for row in rows
            }
        assert exported["PNG"].startswith(b"\x89PNG") and len(exported["PNG"]) > 5_000
    page.locator("#scale input[value=log]").check(force=True)
    page.locator("#unit").select_option("ms")
    page.locator("#device").select_option("l4")
    page.locator("#at").press("ArrowRight")
    at = page.locator("#at-label").text_content()
    page.get_by_role("button", name="Copy a link to this view").click()
    page.wait_for_selector("#link-note:has-text('Copied')")
    address = page.evaluate("navigator.clipboard.readText()")
    other = opened(fragment=address.partition("/#")[2] and f"#{address.partition('#')[2]}")
    other.wait_for_selector("#curve path.line")
    assert other.locator("#text").input_value() == page.locator("#text").input_value()
    assert other.locator("#scale input[value=log]").is_checked()
    assert other.locator("#unit").input_value() == "ms"
    assert other.locator("#device").input_value() == "l4"
    assert other.locator("#at-label").text_content() == at


@pytest.mark.browser
def test_tables_scroll_inside_their_cards(opened: Callable[..., Any]) -> None:
    page = opened(390)
    page.get_by_text("Values as table", exact=True).click()
    choose(page, text="conv2d:n=16,c_in=1024,h=112,w=112,c_out=2048,kh=3,kw=3,pad_h=1,pad_w=1,dtype=float16")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    outside = page.evaluate("""() => [...document.querySelectorAll("table")].filter((table) => table.checkVisibility())
      .filter((table) => table.getBoundingClientRect().right > table.closest(".panel").getBoundingClientRect().right
        && !table.closest(".scroll")).length""")
    assert outside == 0


@pytest.mark.browser
def test_page_works_with_the_keyboard_only(opened: Callable[..., Any]) -> None:
    page = opened()

    def focus() -> str:
        return page.evaluate("document.activeElement.id || document.activeElement.name")

    def tab_to(wanted: str) -> None:
        for _ in range(120):
            page.keyboard.press("Tab")
            if focus() == wanted:
                break
        assert focus() == wanted
        assert page.evaluate("""() => {
          const at = document.activeElement, seen = [at, at.nextElementSibling].filter(Boolean);
          return seen.some((node) => parseFloat(getComputedStyle(node).outlineWidth) >= 2);
        }"""), wanted

    tab_to("text")
    page.keyboard.press("Control+A")
    page.keyboard.type("softmax:rows=4096,cols=1024")
    tab_to("device-none")
    page.keyboard.press("Enter")
    page.keyboard.press("Shift+Tab")
    page.keyboard.type("l40s")
    page.keyboard.press("Enter")
    tab_to("go")
    page.keyboard.press("Enter")
    page.wait_for_selector("#headline:has-text('on l40s')")
    settled(page)
    tab_to("scale")
    page.keyboard.press("ArrowRight")
    assert page.locator("#bars circle.dot").count() == 1
    tab_to("at")
    before = page.locator("#at-label").text_content()
    page.keyboard.press("ArrowLeft")
    assert page.locator("#at-label").text_content() != before
    unnamed = """() => [...document.querySelectorAll("input, select, textarea, button")].filter((node) =>
      !(node.labels?.length || node.ariaLabel || node.textContent.trim())).map((node) => node.outerHTML)"""
    assert page.evaluate(unnamed) == []


@pytest.mark.browser
def test_service_status_is_shown(server: Server, opened: Callable[..., Any]) -> None:
    items = [{"program": LINEAR, "device": "t4"}]
    answers = server.request("POST", "/predict", {"items": items * 4})["results"]
    seen = [{"prediction_id": a["prediction_id"], "latency_s": 1.25 * a["latency_s"]} for a in answers]
    assert server.request("POST", "/observe", {"observations": seen})["accepted"] == 4
    page = opened(fragment="")
    page.get_by_role("link", name="Service status").first.click()
    page.wait_for_selector("#ready:has-text('ready')")
    assert page.locator("#model").text_content() == answers[0]["model_id"]
    row = page.locator("#drift tr[data-device=t4]")
    row.wait_for()
    figures = server.request("GET", "/observe")["devices"][0]
    assert figures["device"] == "t4"
    cells = row.locator("td").all_inner_texts()
    assert cells[0] == "4"
    assert cells[1] == f"{100 * figures['mape']:.0f} %" == "20 %"
    assert cells[2].strip() == f"+{100 * figures['bias']:.0f} %" == "+25 %"
    requests = page.locator("#cards [data-key=requests]").evaluate("node => node.firstChild.data")
    assert int(requests.replace(",", "")) >= 2


@pytest.mark.browser
def test_coverage_is_shown_as_a_matrix(server: Server, opened: Callable[..., Any]) -> None:
    page = opened()
    page.get_by_role("link", name="Coverage").first.click()
    page.wait_for_selector("#matrix table")
    support = server.request("GET", "/support")
    assert page.locator("#model").text_content() == support["model_id"]
    plain = [r for r in support["matrix"]["rows"] if r["weight_dtype"] is None and r["scaling"] is None]
    rows = {f"{r['operator']} {r['dtype']}": r for r in plain}
    trained = [name for name, row in rows.items() if "in" in row["domain"].values()]
    shown_rows = [r.get_attribute("data-row") for r in page.locator("#matrix tbody tr").all()]
    assert set(trained) <= set(shown_rows)
    name = next(name for name in trained if rows[name]["mape"])
    for device, domain in rows[name]["domain"].items():
        cell = page.locator(f"#matrix tr[data-row='{name}'] td[data-device='{device}']")
        assert cell.get_attribute("class") == domain
        error = rows[name]["mape"].get(device)
        assert error is None or cell.text_content() == page.evaluate(
            "async (x) => (await import('/page/units.js')).percent(x)", error
        )
    page.locator("#operator").fill("sigmoid")
    assert page.locator("#matrix tbody tr").count() == 0
    assert 'select "untrained types"' in page.locator("#summary").inner_text()
    page.get_by_label("untrained types").check()
    assert page.locator("#matrix tbody tr").count() == sum(name.startswith("sigmoid ") for name in rows)
    page.locator("#device").fill("b200")
    assert page.locator("#matrix thead th").all_inner_texts()[1:] == ["b200", "gb200", "any other device"]
    page.locator("#device").fill("rtx 4090")
    assert page.locator("#matrix thead th").all_inner_texts()[1:] == ["any other device"]
    assert "predicted by their specification" in page.locator("#summary").inner_text()


@pytest.mark.browser
def test_scripts_agree_with_python(opened: Callable[..., Any]) -> None:
    page = opened()
    texts = ["2*a+b", "a-b-1", "ceil(a/3)*4", "a//4*2", "ceil(10*0.7)", "max(a, b, 3)", "-(a-100)", "min(a,2)"]
    values = {"a": 37, "b": 5}
    script = """async ([texts, values]) => {
      const m = await import('/page/expressions.js');
      return texts.map((text) => m.evaluate(text, values));
    }"""
    python = [Expression(t)({name: exact(value) for name, value in values.items()}) for t in texts]
    assert page.evaluate(script, [texts, values]) == python
    figures = [a * 10.0**b for a in (1, 1.234, 9.995, 9.9949, 99.95, 999.4, 999.6) for b in range(-9, 1)]
    script = """async (figures) => {
      const m = await import('/page/units.js');
      return figures.map((seconds) => m.latency(seconds));
    }"""
    assert page.evaluate(script, figures) == [format_latency(s) for s in figures]
    # Every example that the page offers is an operator.
    script = """async (protocol) => {
      const m = await import('/page/operators.js'), support = await (await fetch('/support')).json();
      return Object.keys(support.operators).map((o) => m.example(o, support, protocol));
    }"""
    for protocol in ("kernel", "graph", "eager"):
        examples = page.evaluate(script, protocol)
        assert {parse_operator(text).operator for text in examples} == set(operator_types())
    script = "async () => (await import('/page/operators.js')).FORMS"
    forms = {name: parse_operator(text) for name, text in page.evaluate(script).items()}
    assert all(name.startswith(spec.operator) for name, spec in forms.items())
