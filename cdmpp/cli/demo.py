"""``python -m cdmpp.cli.demo [--verbose]``: predictions, a plan and an adaptation by a real server, on one screen.

Starts the service with the shipped model on a free port of this machine, asks for two ONNX networks on six GPUs, two
TVM programs on two CPUs, a language model on four GPUs, a plan and an adaptation, prints a table of each, and stops the
service. ``--verbose`` adds intervals, the programs of the networks and the reasons of the plan.
"""

from __future__ import annotations

import contextlib
import csv
import http.client
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from cdmpp.client import PredictorClient
from cdmpp.devices.loading import load_device
from cdmpp.errors import CdmppError
from cdmpp.predict.prediction import Prediction
from cdmpp.predict.rendering import Table, render
from cdmpp.programs.frontends.load import load_programs
from cdmpp.programs.operators import parse_operator
from cdmpp.utils.units import format_latency

ROOT = Path(__file__).resolve().parents[2]
NETWORKS = ("transformer_block.onnx", "small_resnet.onnx")
#: GPUs of the networks. Training had all but the L4.
DEVICES = ("a100-pcie-40gb", "v100-pcie-32gb", "t4", "p100-pcie-16gb", "l4", "h100-sxm")
#: One product in TIR, as written and as scheduled (``examples/tvm_matmul.py``), and CPUs that training had.
TVM_PROGRAMS = ("tvm_matmul.json", "tvm_matmul_tiled.json")
CPUS = ("intel-xeon-amx-2t-avx2", "amd-zen3-2t-avx2")
LANGUAGE_MODEL = "llm/llama-3.1-8b.json"
LLM_DEVICES = ("b200", "h100-sxm", "a100-sxm4-80gb", "l40s")
LLM_WORKLOAD: dict[str, Any] = {"batch": 8, "input": 1024, "output": 128}
PLAN = "docs/examples/compress.json"
#: Own measurements of a device that training did not have (``examples/make_measurements.py``), and its specification.
MEASUREMENTS, MEASURED_DEVICE = "cpu_core.csv", "cpu_core.toml"
MEASURED_PROGRAMS = 24
NEXT = (
    "What next: cdmpp predict linear:m=512,n=4096,k=1024 --device l4   (or model.onnx, a PyTorch module)",
    "           cdmpp llm config.json --device h100-sxm --tp 8         (a config.json of Hugging Face)",
    "           make demo VERBOSE=1, make serve, README.md",
)
START_TIMEOUT_S, ANSWER_TIMEOUT_S, STOP_TIMEOUT_S = 150.0, 150.0, 10.0
#: The demonstration always uses the shipped model, whatever the environment sets.
_SETTINGS = "CDMPP_"


class DemoError(Exception):
    """What ends the demonstration, in one line."""


@dataclass(frozen=True)
class Server:
    """A running service on this machine."""

    port: int
    process: subprocess.Popen[bytes]

    def request(self, method: str, path: str, body: Any = None) -> Any:
        """One exchange; a problem becomes a :class:`DemoError`."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_TIMEOUT_S)
        try:
            payload = None if body is None else json.dumps(body)
            connection.request(method, path, payload, {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = json.loads(response.read())
        finally:
            connection.close()
        if response.status != 200:
            raise DemoError(f"{method} {path}: {response.status} {answer.get('detail', '')}")
        return answer


@contextlib.contextmanager
def running_server(*arguments: str, environment: Mapping[str, str] | None = None) -> Iterator[Server]:
    """Start the service as a process of its own; it ends with the block, whatever happens inside.

    ``*arguments``: more of ``python -m cdmpp_server``. ``environment``: variables to add.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_SETTINGS)}
    command = [sys.executable, "-m", "cdmpp_server", "--host", "127.0.0.1", "--port", str(port), *arguments]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as log:
        # It leaves no database behind.
        variables = {"CDMPP_DATABASE": str(Path(folder) / "service.sqlite")}
        # From the folder that holds the package: a file server.py where the user stands is not ours.
        # A SIGTERM while the process is made would leave it behind: nobody would hold it yet.
        postponed: list[Any] = []
        before = _on_sigterm(lambda *received: postponed.append(received))
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**inherited, **variables, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            _on_sigterm(before)
            if postponed and callable(before):
                before(*postponed[0])
            server = Server(port, process)
            _wait_ready(server, process, log)
            yield server
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _on_sigterm(handler: Any) -> Any:
    """Set the handler and return the one before; None in a thread that may not, and then nothing is set."""
    if handler is None or threading.current_thread() is not threading.main_thread():
        return None
    return signal.signal(signal.SIGTERM, handler)


def _wait_ready(server: Server, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    reason = "no answer"
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise DemoError(f"the server ended with status {process.returncode}: {_reason(log)}")
        try:
            server.request("GET", "/readyz")
            return
        except OSError:  # not listening yet
            time.sleep(0.1)
        except DemoError as error:
            reason = str(error)
            time.sleep(0.5)
    raise DemoError(f"the server was not ready after {START_TIMEOUT_S:g} s: {reason}")


def _reason(log: IO[bytes]) -> str:
    """The last line of a log that names an error."""
    log.seek(0)
    lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "rror" in line or "cannot" in line), "no message")


def networks(answers: Mapping[str, Mapping[str, Any]], *, interval: bool = False) -> Table:
    """One row per device; ``answers`` has the answer of ``POST /models/predict`` by network."""
    rows = [
        (
            totals[0]["device"],
            *(cell for total in totals for cell in (_latency(total, interval=interval), _mark(total))),
        )
        for totals in zip(*(answer["devices"] for answer in answers.values()), strict=True)
    ]
    header = ("device", *(cell for name in answers for cell in (name, "domain")))
    title = "Float32 networks in eager PyTorch, sum of kernels (image networks have errors of 27 to 44 %)"
    return Table(header, rows, title=title)


def programs(name: str, answer: Mapping[str, Any]) -> Table:
    """Each program of a network on each device, most expensive first, then the nodes that are not predicted."""
    rows = [
        (program["name"], str(program["count"]), result["device"], _latency(result, interval=True), _mark(result))
        for program in answer["programs"]
        for result in program["answers"]
    ]
    rows += [(u["operator"], str(u["count"]), "-", f"not predicted: {u['reason']}", "-") for u in answer["unsupported"]]
    return Table((name, "times", "device", "latency [80 % interval]", "domain"), rows, right=(1,))


def tvm_programs(predictions: Sequence[Prediction]) -> Table:
    """One row per device with the latency of each program of :data:`TVM_PROGRAMS` and its interval."""
    by_device = [[vars(p) for p in predictions[i :: len(CPUS)]] for i in range(len(CPUS))]
    rows = [
        (rows_of_device[0]["device"], *(c for p in rows_of_device for c in (_latency(p, interval=True), _mark(p))))
        for rows_of_device in by_device
    ]
    title = "TVM programs: a float32 product of 256 x 256 matrices as written and as scheduled [80 % interval]"
    return Table(("device", *(c for p in by_device[0] for c in (p["name"], "domain"))), rows, title=title)


def language_model(answers: Sequence[Mapping[str, Any]], *, interval: bool = False) -> Table:
    """First token, each further token and throughput on each device."""
    rows = [
        (
            answer["device"],
            *(_latency(answer, figure, interval=interval) for figure in ("ttft", "tpot")),
            f"{answer['throughput_tokens_per_s']:,.0f}",
            _mark(answer),
        )
        for answer in answers
    ]
    title = "Llama 3.1 8B in bfloat16 on one GPU: {batch} prompts of {input:,} tokens, {output} tokens each, vLLM"
    header = ("device", "first token", "per token", "tokens/s", "domain")
    return Table(header, rows, right=(3,), title=title.format(**LLM_WORKLOAD))


def plan(answer: Mapping[str, Any]) -> Table:
    """The iteration of the plan and of its baselines."""
    rows = [(name, format_latency(seconds)) for name, seconds in answer["baselines"].items()]
    rows.append(("this plan", format_latency(answer["iteration_s"])))
    rows.append(("lower bound", format_latency(answer["lower_bound_s"])))
    tensors, domain = len(answer["tensors"]), answer["domain"]
    title = f"Plan: which of {tensors} gradients to compress before the network exchanges them; domain {domain}"
    return Table(("compression", "iteration"), rows, title=title)


def adaptation(report: Mapping[str, Any]) -> Table:
    """Errors before and after the adaptation, on the measurements that it did not use."""
    before, after = report["before"]["overall"], report["after"]["overall"]
    rows = [
        (name, *(f"{100 * errors[key]:.1f} %" for key in ("mape", "median_ape", "within_20", "coverage")))
        for name, errors in (("data sheet only", before), (f"{MEASURED_PROGRAMS} measurements", after))
    ]
    title = f"Adaptation: PyTorch on one CPU core, which is new to the model; {after['n']} other measurements"
    header = ("model", "mean error", "median", "within 20 %", "in 80 % interval")
    return Table(header, rows, right=(1, 2, 3, 4), title=title)


def _latency(result: Mapping[str, Any], figure: str = "", *, interval: bool = False) -> str:
    """Text of ``latency_s``, or of another figure; "at least" marks the lower bound of a sum."""
    point = result.get(f"{figure or 'latency'}_s")
    if point is None:
        return f"not predicted: {result['error']['message']}" if "error" in result else "not predicted"
    text = ("at least " if result.get("lower_bound") else "") + format_latency(point)
    if not interval:
        return text
    lower, upper = (format_latency(result["_".join(filter(None, (figure, end, "s")))]) for end in ("lower", "upper"))
    return f"{text} [{lower}, {upper}]"


def _mark(result: Mapping[str, Any]) -> str:
    return str(result.get("domain") or "-")


def sections(server: Server, examples: Path, verbose: bool) -> Iterator[list[Table]]:
    """Ask the service; the tables of one part after the other."""
    with PredictorClient(f"http://127.0.0.1:{server.port}", timeout_s=ANSWER_TIMEOUT_S) as client:
        marks = "in = in the training data, near = one thing is new, out = a guess"
        yield [Table.lines(f"model {client.model_id}; domain: {marks}")]
        answers = {
            name: client.predict_onnx(examples / name, DEVICES, protocol="eager", framework="pytorch")
            for name in NETWORKS
        }
        yield [networks(answers, interval=verbose)]
        yield [programs(name, answer) for name, answer in answers.items() if verbose]
        scheduled = [load_programs(examples / name).programs[0] for name in TVM_PROGRAMS]
        yield [tvm_programs(client.predict(scheduled, CPUS))]
        estimates = client.llm(examples / LANGUAGE_MODEL, LLM_DEVICES, **LLM_WORKLOAD)
        yield [language_model(estimates, interval=verbose)]
        answer = client.plan("compress", json.loads((examples.parent / PLAN).read_text(encoding="utf-8")))
        yield [plan(answer), Table.lines(*(answer["explanation"] if verbose else ()))]
        with (examples / MEASUREMENTS).open(encoding="utf-8", newline="") as file:
            records = [
                {
                    "program": parse_operator(row["program"]).canonical(),
                    "latency_s": float(row["latency_us"]) / 1e6,
                    "protocol": row["protocol"],
                    "framework": row["framework"],
                }
                for row in csv.DictReader(file)
            ]
        device = load_device(str(examples / MEASURED_DEVICE)).model_dump(mode="json", exclude_none=True)
        report = server.request("POST", "/adapt", {"device": device, "k": MEASURED_PROGRAMS, "records": records})
        yield [adaptation(report), Table.lines(*(w["message"] for w in report["warnings"]))]
        yield [Table.lines(*NEXT)]


def run(examples: Path, verbose: bool = False) -> None:
    """Print the demonstration."""
    for name in (*NETWORKS, *TVM_PROGRAMS, LANGUAGE_MODEL, MEASUREMENTS, MEASURED_DEVICE):
        if not (examples / name).is_file():
            raise DemoError(f"{examples / name} is missing: run the demonstration from a checkout")
    # A busy machine may need longer than the usual deadline of a request.
    with running_server(environment={"CDMPP_DEADLINE_S": f"{ANSWER_TIMEOUT_S:g}"}) as server:
        for tables in filter(any, sections(server, examples, verbose)):
            print(render(tables) + "\n", flush=True)


def main(verbose: bool = False) -> int:
    """Run the demonstration; 0, or 1 with one line that says why not."""
    # Without this a terminated demonstration would leave its server behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Where µ cannot be written, a query mark is better than no table.
        sys.stdout.reconfigure(errors="replace")
    try:
        run(ROOT / "examples", verbose)
    except BrokenPipeError:
        # The reader has gone (`| head`); what is left in the buffer has nowhere to go either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (CdmppError, DemoError, OSError, ValueError, http.client.HTTPException) as error:
        hint = f" ({error.hint})" if isinstance(error, CdmppError) and error.hint else ""
        print(f"error: {' '.join(str(error).split()) or type(error).__name__}{hint}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main("--verbose" in sys.argv[1:]))
