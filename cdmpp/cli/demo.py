"""``python -m cdmpp.cli.demo``: two networks on six GPUs and a language model on four, through the real server.

Starts the service with the shipped model on a free port of this machine, reads two ONNX files into
tensor programs, asks ``POST /predict`` for all of them on every GPU, prints the most expensive programs
and the sums, asks ``POST /llm`` for a language model, and stops the service again.
"""

from __future__ import annotations

import contextlib
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

from cdmpp.errors import CdmppError
from cdmpp.predict.requests.render import format_columns
from cdmpp.programs.frontends.graph import ProgramGraph
from cdmpp.programs.frontends.load import load_programs
from cdmpp.programs.program import TensorProgram
from cdmpp.utils.units import format_latency

ROOT = Path(__file__).resolve().parents[2]
NETWORKS = ("transformer_block.onnx", "small_resnet.onnx")
#: GPUs of the networks; the output says which of them training had.
DEVICES = ("a100-pcie-40gb", "v100-pcie-32gb", "t4", "p100-pcie-16gb", "l4", "h100-sxm")
#: The language model, and the four kinds of machines of the question about it.
LANGUAGE_MODEL = "llm/llama-3.1-8b.json"
LLM_DEVICES = ("b200", "h100-sxm", "a100-sxm4-80gb", "l40s")
LLM_WORKLOAD = {"batch": 8, "input": 1024, "output": 128}
QUANTILES = (0.1, 0.9)
#: Programs shown of each network.
SHOWN = 6
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

    Parameters
    ----------
    *arguments : str
        More of ``python -m cdmpp_server``.
    environment : mapping, optional
        Variables to add.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_SETTINGS)}
    command = [sys.executable, "-m", "cdmpp_server", "--host", "127.0.0.1", "--port", str(port), *arguments]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as log:
        # It leaves no database behind.
        own = {"CDMPP_DATABASE": str(Path(folder) / "service.sqlite")}
        # From the folder that holds the package: a file server.py where the user stands is not ours.
        # A SIGTERM while the process is made would leave it behind: nobody would hold it yet.
        postponed: list[Any] = []
        before = _on_sigterm(lambda *received: postponed.append(received))
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**inherited, **own, **(environment or {})},
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


def wire_program(program: TensorProgram) -> dict[str, Any]:
    """A program as ``/predict`` takes it."""
    if program.operator is not None:
        return program.operator.canonical()
    return {"tvm_json": program.tvm_json}


def ask(server: Server, graph: ProgramGraph) -> list[list[dict[str, Any]]]:
    """Results for each program (outer) and device (inner), by one request."""
    items = [
        {
            "id": f"{index}@{device}",
            "program": wire_program(program),
            "backend": program.backend,
            "device": device,
            "protocol": "eager",
            "framework": "pytorch",
        }
        for index, program in enumerate(graph.programs)
        for device in DEVICES
    ]
    results = server.request("POST", "/predict", {"items": items, "quantiles": QUANTILES})["results"]
    width = len(DEVICES)
    return [results[start : start + width] for start in range(0, len(results), width)]


def report(name: str, graph: ProgramGraph, answers: Sequence[Sequence[dict[str, Any]]]) -> Iterator[str]:
    """The lines of one network: the programs that take most time, the sums, then what is missing."""
    shown = sorted(
        zip(graph.programs, graph.counts, answers, strict=True),
        key=lambda entry: -entry[1] * sum(result.get("latency_s", 0.0) for result in entry[2]),
    )[:SHOWN]
    yield (
        f"{name}: {len(graph.programs)} distinct programs, {graph.launches} launches; "
        f"the {len(shown)} programs that take most time:"
    )
    rows = [("program", "times", "device", "latency [80 % interval]", "trained domain")]
    for program, count, results in shown:
        for device, result in zip(DEVICES, results, strict=True):
            if "error" in result:
                rows.append((program.name, str(count), device, "not predicted", "-"))
                continue
            latency, low, high = (format_latency(result[k]) for k in ("latency_s", "lower_s", "upper_s"))
            rows.append((program.name, str(count), device, f"{latency} [{low}, {high}]", result["domain"]))
    yield from (f"  {line}" for line in format_columns(rows))
    yield ""
    yield f"{name}: sum over its launches (times x latency)"
    sums = [("device", "sum", "launches in it")]
    for position, device in enumerate(DEVICES):
        parts = [
            (count, results[position]["latency_s"])
            for count, results in zip(graph.counts, answers, strict=True)
            if "error" not in results[position]
        ]
        covered = f"{sum(count for count, _ in parts)} of {_all_launches(graph)}"
        total = format_latency(sum(n * s for n, s in parts)) if parts else "not predicted"
        sums.append((device, total, covered))
    yield from (f"  {line}" for line in format_columns(sums))
    yield "A sum leaves out what runs between kernels; image networks are predicted less well than transformers."
    yield from missing(graph, answers)


def report_llm(name: str, answers: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The lines of the language model."""
    w = LLM_WORKLOAD
    yield (
        f"{name}: a batch of {w['batch']} prompts of {w['input']:,} tokens with {w['output']} output tokens each, "
        "on one GPU, bfloat16, as vLLM runs it:"
    )
    rows = [("device", "first token [80 % interval]", "per output token [80 % interval]", "tokens/s", "trained domain")]
    for answer in answers:
        first, each = (
            "{} [{}, {}]".format(*(format_latency(answer[f"{figure}{end}_s"]) for end in ("", "_lower", "_upper")))
            for figure in ("ttft", "tpot")
        )
        rows.append((answer["device"], first, each, f"{answer['throughput_tokens_per_s']:,.0f}", answer["domain"]))
    yield from (f"  {line}" for line in format_columns(rows))


def missing(graph: ProgramGraph, answers: Sequence[Sequence[dict[str, Any]]]) -> Iterator[str]:
    """One line for each program that has no figure, with the reason; one line when there is none."""
    lines = [f"not predicted: {u.operator} ({u.count} times): {u.reason}" for u in graph.unsupported]
    for program, count, results in zip(graph.programs, graph.counts, answers, strict=True):
        reasons: dict[str, list[str]] = {}
        for device, result in zip(DEVICES, results, strict=True):
            if "error" in result:
                reasons.setdefault(result["error"]["message"], []).append(device)
        for reason, devices in reasons.items():
            lines.append(f"not predicted: {program.name} ({count} times) on {', '.join(devices)}: {reason}")
    yield from lines or ["not predicted: none"]


def _all_launches(graph: ProgramGraph) -> int:
    return graph.launches + sum(u.count for u in graph.unsupported)


def header(server: Server) -> Iterator[str]:
    """Which latency is meant, by which model, and which devices it was trained on."""
    trained = {device["name"] for device in server.request("GET", "/devices")["devices"] if device["trained"]}
    seen = [device for device in DEVICES if device in trained]
    unseen = [device for device in DEVICES if device not in trained]
    yield "Predicted latency of the tensor programs of two float32 networks on GPUs that need not be here."
    yield (
        "Meant is the latency of library kernels (cuDNN, cuBLAS, ...) as eager PyTorch launches them, "
        "launch cost inside: backend library, protocol eager, framework pytorch."
    )
    yield f"model:             {server.request('GET', '/readyz')['model_id']}"
    yield f"seen in training:  {', '.join(seen) or 'none of these devices'}"
    yield f"never seen:        {', '.join(unseen) or 'none of these devices'}"


def run(examples: Path) -> None:
    """Print the whole demonstration."""
    graphs = []
    for name in NETWORKS:
        if not (examples / name).is_file():
            raise DemoError(f"{examples / name} is missing: run the demonstration from a checkout")
        graphs.append((name, load_programs(examples / name)))
    with running_server() as server:
        print("\n".join(header(server)), flush=True)
        for name, graph in graphs:
            print("\n" + "\n".join(report(name, graph, ask(server, graph))), flush=True)
        config = json.loads((examples / LANGUAGE_MODEL).read_text(encoding="utf-8"))
        question = {"config": config, "devices": list(LLM_DEVICES), **LLM_WORKLOAD}
        answers = server.request("POST", "/llm", question)["answers"]
        print("\n" + "\n".join(report_llm(LANGUAGE_MODEL, answers)), flush=True)


def main() -> int:
    """Run the demonstration; 0, or 1 with one line that says why not."""
    # Without this a terminated demonstration would leave its server behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Where µ cannot be written, a query mark is better than no table.
        sys.stdout.reconfigure(errors="replace")
    try:
        run(ROOT / "examples")
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
    sys.exit(main())
