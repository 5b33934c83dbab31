"""The sandbox: equal features, limits, supervision, confinement, and validation of replies."""

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.fuzz import mutate
from benchmarks.fuzz.models import onnx_case
from cdmpp.errors import CdmppError, InvalidProgramError, OverloadedError, UnsupportedOperatorError
from cdmpp.features.encode import EncodedProgram, encode_tvm_json
from cdmpp.features.schedule import SCHEDULE_WIDTH
from cdmpp.features.schema import WIDTH
from cdmpp.programs.frontends.load import load_programs
from cdmpp.programs.program import TensorProgram
from cdmpp_server.sandbox import frames, jobs
from cdmpp_server.sandbox.replies import InvalidReplyError, encoded_program, model_summary
from cdmpp_server.sandbox.sandbox import Sandbox, TirText
from cdmpp_server.sandbox.worker import Worker, WorkerDiedError
from tests.features.test_hostile_json import concrete
from tests.waiting import PATIENCE_S, ROOT, is_running, run_python, wait_until

pytestmark = pytest.mark.slow

T = TypeVar("T")
TEXTS = [json.dumps(concrete(text)) for text in ("linear:m=4,n=8,k=16", "softmax:rows=32,cols=16")]
HASHES = [TensorProgram.from_tvm_json(text).hash for text in TEXTS]
#: A short text that becomes many objects.
BOMB = '{"nodes": [' + "{}," * 1_000_000 + "{}]}"
SCRIPT = """
@T.prim_func(s_tir=True)
def twice(a: T.Buffer((64, 32), "float32"), b: T.Buffer((64, 32), "float32")):
    for i, j in T.grid(64, 32):
        with T.sblock("b"):
            vi, vj = T.axis.remap("SS", [i, j])
            b[vi, vj] = a[vi, vj] * T.float32(2)
"""


async def encode_all(sandbox: Sandbox, *texts: str) -> list[Any]:
    """Encode TVM JSON; errors take the place of their programs."""
    return await sandbox.encode_tirs([TirText("tvm_json", text, "tvm") for text in texts])


async def encode(sandbox: Sandbox, text: str) -> EncodedProgram:
    """Encode one TVM JSON; its error is raised."""
    (result,) = await encode_all(sandbox, text)
    if isinstance(result, CdmppError):
        raise result
    return result


def inside(use: Callable[[Sandbox], Awaitable[T]], **options: Any) -> T:
    """Run ``use`` with a sandbox that is closed afterwards."""

    async def main() -> T:
        async with Sandbox(**{"timeout_s": PATIENCE_S, **options}) as sandbox:
            return await use(sandbox)

    return asyncio.run(main())


def refused(result: Any) -> str:
    assert isinstance(result, InvalidProgramError), result
    return result.message


# -- equal results --------------------------------------------------------------------------------------


def test_features_equal_those_computed_in_process() -> None:
    first, second, error, *again = inside(lambda sandbox: encode_all(sandbox, *TEXTS, "{", *TEXTS))
    assert isinstance(error, InvalidProgramError)
    assert error.hint
    assert [program.hash for program in (first, second, *again)] == HASHES * 2
    for text, got in zip(TEXTS * 2, [first, second, *again], strict=True):
        here = encode_tvm_json(text, schedule=True)
        assert (got.name, got.backend, got.operator) == ("main", "tvm", "tir")
        for name in ("leaves", "positions", "totals"):
            assert np.array_equal(getattr(got.features, name), getattr(here, name))
        assert (got.features.dtype, got.features.family) == (here.dtype, here.family)


@pytest.mark.tvm
def test_tvmscript_is_read_by_its_own_worker() -> None:
    from cdmpp.programs.frontends.tir import program_from_tvmscript

    async def use(sandbox: Sandbox) -> Any:
        texts = [("tvmscript", SCRIPT), ("tvm_json", TEXTS[0]), ("tvmscript", "import os"), ("tvm_json", "{")]
        both = await sandbox.encode_tirs([TirText(kind, text, "library") for kind, text in texts])
        with pytest.raises(InvalidProgramError, match="line 1"):
            await sandbox.script_as_json("import os")
        return both, await sandbox.script_as_json(SCRIPT), len(sandbox.pids), sandbox.restarts

    (script, as_json, *bad), text, processes, restarts = inside(use)
    assert TensorProgram.from_tvm_json(text).hash == script.hash
    assert (script.name, script.backend) == ("twice", "library")
    assert script.hash == program_from_tvmscript(SCRIPT).hash
    assert as_json.hash == HASHES[0]
    assert ["line 1" in refused(error) for error in bad] == [True, True]
    # TVM has a separate worker, so that its start does not delay other texts.
    assert (processes, restarts) == (2, 0)


def test_onnx_model_equals_the_one_read_by_the_command_line() -> None:
    paths = [ROOT / "examples" / f"{name}.onnx" for name in ("small_resnet", "transformer_block")]

    async def use(sandbox: Sandbox) -> Any:
        last = paths[-1].read_bytes()
        with pytest.raises(InvalidProgramError, match="different programs"):
            await sandbox.read_onnx(last, max_programs=1)
        with pytest.raises(InvalidProgramError, match="no dynamic dimension"):
            await sandbox.read_onnx(last, {"nothing": 1})
        return [await sandbox.read_onnx(path.read_bytes()) for path in paths]

    for path, there in zip(paths, inside(use), strict=True):
        here = load_programs(path)
        assert [p.hash for p in there.programs] == [p.hash for p in here.programs]
        assert there.counts == here.counts
        assert [(u.operator, u.count, u.reason) for u in there.unsupported] == [
            (u.operator, u.count, u.reason) for u in here.unsupported
        ]


# -- hostile texts --------------------------------------------------------------------------------------


def test_memory_time_and_depth_limits_refuse_only_the_program() -> None:
    async def use(sandbox: Sandbox) -> Any:
        (memory,) = await encode_all(sandbox, BOMB)
        deep, surrogate = await encode_all(sandbox, "[" * 1_000_000, '"\ud800"')
        sandbox.timeout_s = 0.001
        (late,) = await encode_all(sandbox, BOMB[:2_000_000])
        sandbox.timeout_s = PATIENCE_S
        return memory, deep, surrogate, late, await encode(sandbox, TEXTS[0])

    memory, deep, surrogate, late, after = inside(use, memory_bytes=64 * 2**20)
    assert "too much memory" in refused(memory)
    assert "not JSON" in refused(deep)
    assert refused(surrogate)
    assert "more than 0.001 s" in refused(late)
    assert after.hash == HASHES[0]


def test_killed_worker_is_replaced_without_an_error() -> None:
    async def use(sandbox: Sandbox) -> None:
        await encode(sandbox, TEXTS[0])
        (pid,) = sandbox.pids
        os.kill(pid, signal.SIGKILL)
        assert (await encode(sandbox, TEXTS[0])).hash == HASHES[0]
        assert pid not in sandbox.pids

    inside(use)


def test_text_that_kills_two_readers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Worker.run

    async def shot(self: Worker, header: Any, payload: bytes, timeout_s: float, on_progress: Any = None) -> Any:
        if b"deadly" in payload:
            os.kill(self.pid, signal.SIGSEGV)
        return await run(self, header, payload, timeout_s, on_progress)

    monkeypatch.setattr(Worker, "run", shot)

    async def use(sandbox: Sandbox) -> None:
        first, deadly, last = await encode_all(sandbox, TEXTS[0], '"deadly"', TEXTS[1])
        assert "crashed" in refused(deadly)
        assert [first.hash, last.hash] == HASHES
        assert sandbox.restarts == 2

    inside(use)


# -- queue ----------------------------------------------------------------------------------------------


def test_full_queue_refuses_and_cancelled_requests_leave_it() -> None:
    async def use(sandbox: Sandbox) -> None:
        begun = [asyncio.create_task(encode_all(sandbox, BOMB)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError):
            await encode(sandbox, TEXTS[0])
        for task in begun:
            task.cancel()
        await asyncio.gather(*begun, return_exceptions=True)
        while sandbox.queued:
            await asyncio.sleep(0.01)
        assert (await encode(sandbox, TEXTS[0])).hash

    inside(use, max_queued=2)


def test_without_a_queue_a_second_request_is_refused() -> None:
    async def use(sandbox: Sandbox) -> list[Any]:
        first = [await encode(sandbox, text) for text in TEXTS]
        both = [encode(sandbox, text) for text in TEXTS]
        return [*first, *await asyncio.gather(*both, return_exceptions=True)]

    *done, refused_now = inside(use, max_queued=0)
    assert [program.name for program in done] == ["main"] * 3
    assert isinstance(refused_now, OverloadedError)


def test_closing_refuses_waiting_requests() -> None:
    async def main() -> list[BaseException | Any]:
        sandbox = Sandbox()
        tasks = [asyncio.create_task(encode(sandbox, TEXTS[0])) for _ in range(3)]
        await asyncio.sleep(0)
        await sandbox.close()
        with pytest.raises(OverloadedError):
            await encode(sandbox, TEXTS[0])
        return await asyncio.gather(*tasks, return_exceptions=True)

    assert all(isinstance(outcome, OverloadedError) for outcome in asyncio.run(main()))


def test_failed_worker_start_is_overloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(OverloadedError):
        inside(lambda sandbox: encode(sandbox, TEXTS[0]))


# -- confinement ----------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_worker_has_no_secrets_and_ends_with_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CDMPP_DATABASE", "postgresql://user:secret@host/db")

    async def use(sandbox: Sandbox) -> tuple[bytes, str]:
        await encode(sandbox, TEXTS[0])
        (pid,) = sandbox.pids
        process = Path(f"/proc/{pid}")
        return (process / "environ").read_bytes(), (process / "limits").read_text()

    environment, limits = inside(use, memory_bytes=2**30)
    assert b"secret" not in environment
    table = {line[:25].strip(): line[25:].split()[:2] for line in limits.splitlines()}
    assert table["Max core file size"] == table["Max file size"] == ["0", "0"]
    assert table["Max open files"] == ["32", "32"]
    assert 2**30 < int(table["Max address space"][1]) < 2**32

    # kill -9 of the service: the worker must end too.
    script = textwrap.dedent("""
        import asyncio, sys
        from cdmpp_server.sandbox.sandbox import Sandbox
        async def main():
            sandbox = Sandbox(timeout_s=600)
            await sandbox.read_onnx(open(sys.argv[1], "rb").read())
            print(*sandbox.pids, flush=True)
            await asyncio.Event().wait()
        asyncio.run(main())
        """)
    service = subprocess.Popen(
        [sys.executable, "-c", script, str(ROOT / "examples" / "small_resnet.onnx")], stdout=subprocess.PIPE, cwd=ROOT
    )
    with service:
        assert service.stdout is not None
        pid = int(service.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
        service.kill()
    wait_until(lambda: not is_running(pid), "the end of the worker")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_worker_does_not_inherit_the_listening_socket() -> None:
    uvloop = pytest.importorskip("uvloop", reason="needs uvloop, which the service uses where it exists")

    async def main() -> set[str]:
        async with Sandbox(timeout_s=PATIENCE_S) as sandbox:
            await encode(sandbox, TEXTS[0])
            (pid,) = sandbox.pids
            return {os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()}

    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.set_inheritable(True)
        assert f"socket:[{os.fstat(listening.fileno()).st_ino}]" not in uvloop.run(main())


@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
def test_confined_process_cannot_write_files_or_exceed_memory(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import resource, sys
        from cdmpp_server.sandbox.confine import confine
        assert confine(256 * 2**20)
        def fails(what):
            try:
                what()
            except (OSError, MemoryError, ValueError) as error:
                return type(error).__name__
            return "works"
        def write():
            with open(sys.argv[1], "w") as file:
                file.write("x")
        print(fails(write), fails(lambda: bytearray(2**29)), fails(lambda: bytearray(2**20)))
        files = []
        print(fails(lambda: [files.append(open("/dev/null")) for _ in range(40)]))
        everything = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        print(resource.getrlimit(resource.RLIMIT_AS)[1] < 2**40)
        """)
    done = run_python("-c", script, tmp_path / "file")
    assert done.stdout.split() == ["OSError", "MemoryError", "works", "OSError", "True"], done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="Landlock is Linux's")
def test_confined_process_cannot_read_files_connect_or_signal(tmp_path: Path) -> None:
    secret = tmp_path / "settings.toml"
    secret.write_text("secret")
    script = textwrap.dedent("""
        import os, socket, sys
        from cdmpp_server.sandbox.confine import keep_to_code
        if not keep_to_code():
            print("none")
            raise SystemExit
        def outcome(what):
            try:
                what()
            except PermissionError:
                return "denied"
            return "works"
        own, port = sys.argv[1], int(sys.argv[2])
        print(outcome(lambda: open(own).read()), outcome(lambda: open(own + "2", "w")))
        print(outcome(lambda: socket.create_connection(("127.0.0.1", port), 5)))
        print(outcome(lambda: os.kill(os.getppid(), 0)))
        print(outcome(lambda: open(f"/proc/{os.getppid()}/environ").read()))
        print(outcome(lambda: os.execv(sys.executable, [sys.executable, "-c", ""])))
        print(outcome(lambda: open(os.__file__).read()))
        """)
    with socket.create_server(("127.0.0.1", 0)) as server:
        done = run_python("-c", script, secret, str(server.getsockname()[1]))
    if done.stdout.split() == ["none"]:
        pytest.skip("this system has no Landlock")
    assert done.stdout.split() == ["denied"] * 6 + ["works"], done.stderr


# -- mutated texts ---------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(st.sampled_from(TEXTS), st.randoms(use_true_random=False), st.booleans())
def test_mutated_tvm_json_is_a_program_or_an_error(text: str, rng: random.Random, as_bytes: bool) -> None:
    if as_bytes:
        data = mutate.octets(rng, text.encode()).decode("utf-8", "replace").encode()
    else:
        data = json.dumps(mutate.json_value(rng, json.loads(text))).encode()
    check_reply(*jobs.run({"kind": "tvm_json", "backend": "tvm"}, data))


@settings(max_examples=150)
@given(st.randoms(use_true_random=False))
def test_mutated_onnx_file_is_a_model_or_an_error(rng: random.Random) -> None:
    reply, data = jobs.run({"kind": "onnx", "dims": {}, "max_programs": 100}, onnx_case(rng))
    assert "bug" not in reply, reply
    if "error" not in reply:
        assert model_summary(json.loads(json.dumps(reply)), 100).programs is not None
    assert data == b""


def check_reply(reply: dict[str, Any], data: bytes) -> None:
    """Check that the service accepts the reply, as features or as an error of the text."""
    assert "bug" not in reply, reply
    try:
        encoded_program(json.loads(json.dumps(reply)), data, "tvm")
    except CdmppError as error:
        assert error.code in ("invalid_program", "unsupported_operator")
        assert error.message


# -- invalid replies ------------------------------------------------------------------------------------


def leaves(programs: int, count: int, value: float = 0.0) -> np.ndarray:
    return np.full((programs, count, WIDTH + SCHEDULE_WIDTH), value, np.float32)


def arrays(**changed: Any) -> bytes:
    good = {"leaves": leaves(1, 2), "positions": np.zeros(2, np.int32), "totals": np.ones((1, 6))}
    return safetensors.numpy.save({k: v for k, v in (good | changed).items() if v is not None})


REPLY = {"name": "main", "hash": "0" * 32, "dtype": "float32"}


def test_valid_reply_is_accepted() -> None:
    assert encoded_program(REPLY, arrays(), "tvm").features.leaves.shape == (1, 2, WIDTH + SCHEDULE_WIDTH)


@pytest.mark.parametrize(
    ("reply", "payload"),
    [
        ({}, arrays()),
        ({**REPLY, "name": "x" * 401}, arrays()),
        ({**REPLY, "name": None}, arrays()),
        ({**REPLY, "hash": "G" * 32}, arrays()),
        ({**REPLY, "hash": "0" * 31}, arrays()),
        ({**REPLY, "dtype": "Float 32"}, arrays()),
        (REPLY, b""),
        (REPLY, b"\xff" * 100),
        (REPLY, arrays()[:-1]),
        (REPLY, arrays(more=np.zeros(1))),
        (REPLY, arrays(totals=None)),
        (REPLY, arrays(totals=np.full((1, 6), np.nan))),
        (REPLY, arrays(totals=np.full((1, 6), -1.0))),
        (REPLY, arrays(totals=np.full((1, 6), 1e300))),
        (REPLY, arrays(leaves=leaves(1, 2, 1e30))),
        (REPLY, arrays(totals=np.ones((1, 6), np.float32))),
        (REPLY, arrays(positions=np.full(2, -1, np.int32))),
        (REPLY, arrays(positions=np.zeros(3, np.int32))),
        (REPLY, arrays(leaves=leaves(1, 0), positions=np.zeros(0, np.int32))),
        (REPLY, arrays(leaves=leaves(2, 2))),
        (REPLY, arrays(leaves=leaves(1, 2)[..., :WIDTH])),
        (REPLY, arrays(leaves=leaves(1, 2, np.inf))),
        ({"error": "no"}, b""),
        ({"error": {"code": "artifact_error", "message": "x", "hint": ""}}, b""),
        ({"error": {"code": "invalid_program", "message": 3, "hint": ""}}, b""),
        ({"error": {"code": "invalid_program", "message": "x" * 2000, "hint": ""}}, b""),
    ],
)
def test_invalid_features_are_rejected(reply: dict[str, Any], payload: bytes) -> None:
    with pytest.raises(InvalidReplyError):
        encoded_program(reply, payload, "tvm")


LINEAR = {"operator": "linear", "m": 4, "n": 4, "k": 4}
NODES = {"operator": "Foo", "count": 1, "reason": "unknown"}


@pytest.mark.parametrize(
    "reply",
    [
        {},
        {"programs": [], "unsupported": None},
        {"programs": [{"program": LINEAR, "count": 0}], "unsupported": []},
        {"programs": [{"program": LINEAR, "count": True}], "unsupported": []},
        {"programs": [{"program": LINEAR, "count": 2**40}], "unsupported": []},
        {"programs": [{"program": LINEAR, "count": 1, "x": 1}], "unsupported": []},
        {"programs": [{"program": {**LINEAR, "m": -1}, "count": 1}], "unsupported": []},
        {"programs": [{"program": "linear", "count": 1}], "unsupported": []},
        {"programs": [{"program": LINEAR, "count": 1}] * 5, "unsupported": []},
        {"programs": [], "unsupported": [{**NODES, "reason": "x" * 2000}]},
    ],
)
def test_invalid_models_are_rejected(reply: dict[str, Any]) -> None:
    honest = model_summary({"programs": [{"program": LINEAR, "count": 2}], "unsupported": [NODES]}, 4)
    assert (honest.programs[0].operator.m, honest.counts) == (4, (2,))
    with pytest.raises(InvalidReplyError):
        model_summary(reply, 4)


def test_errors_of_a_reply_keep_class_message_and_hint() -> None:
    for code, kind in (("invalid_program", InvalidProgramError), ("unsupported_operator", UnsupportedOperatorError)):
        error = {"code": code, "message": "what", "hint": "do"}
        with pytest.raises(CdmppError) as caught:
            encoded_program({"error": error}, b"", "tvm")
        assert (type(caught.value), caught.value.message, caught.value.hint) == (kind, "what", "do")


@pytest.mark.parametrize("prefix", [(2**31, 0), (0, 2**40)])
def test_too_long_message_is_rejected(prefix: tuple[int, int]) -> None:
    with pytest.raises(frames.BrokenFrameError):
        frames.lengths(frames.PREFIX.pack(*prefix), 2**20, 2**20)


@pytest.mark.parametrize("text", [b"", b"[]", b"\xff", b"[" * 100_000, b"{"])
def test_invalid_header_is_rejected(text: bytes) -> None:
    with pytest.raises(frames.BrokenFrameError):
        frames.header_of(text)


async def test_ended_worker_raises_worker_died_error() -> None:
    worker = Worker(2**30)
    await worker.start()
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError):
        await worker.run({"kind": "tvm_json", "backend": "tvm"}, b"{}", PATIENCE_S)
    assert worker.pid is None
    with pytest.raises(WorkerDiedError):
        await worker.run({"kind": "tvm_json", "backend": "tvm"}, b"{}", PATIENCE_S)


@pytest.mark.tvm
def test_service_process_never_loads_parsers(tmp_path: Path) -> None:
    """Neither TVM nor the reader of ONNX models is imported in the service, whatever the request."""
    script = textwrap.dedent("""
        import json, sys
        from fastapi.testclient import TestClient
        from cdmpp_server.app import create_app
        from cdmpp_server.settings import Settings
        tvmscript, path, database = sys.argv[1:]
        settings = Settings(model=None, database=database, deadline_s=600, sandbox_timeout_s=500)
        with TestClient(create_app(settings)) as client:
            program = {"tvmscript": tvmscript}
            predicted = client.post("/predict", json={"items": [{"program": program, "device": "iphone-7"}]})
            print(predicted.json()["results"][0]["backend"])
            record = {"program": program, "latency_s": 1e-4}
            operators = [{"operator": "linear", "m": 64, "n": 64, "k": k} for k in (8, 16, 32)]
            records = [record, *({"program": o, "latency_s": 1e-5} for o in operators)]
            adapted = client.post("/adapt", json={"device": "iphone-7", "records": records})
            print(adapted.status_code, adapted.json().get("adapted_model", adapted.text) != "")
            kind = {"content-type": "application/octet-stream"}
            model = client.post("/models/predict?device=t4", content=open(path, "rb").read(), headers=kind)
            print(model.status_code)
        readers = (f"cdmpp.programs.frontends.{name}" for name in ("onnx_model", "tvmscript_check"))
        parsers = ("tvm", "tvm_ffi", "torch", *readers)
        print([name for name in parsers if name in sys.modules])
        """)
    done = run_python("-c", script, SCRIPT, ROOT / "examples" / "small_resnet.onnx", tmp_path / "db")
    assert done.stdout.splitlines() == ["tvm", "200 True", "200", "[]"], done.stdout + done.stderr[-3000:]


def test_stderr_tail_is_one_printable_line() -> None:
    worker = Worker(2**30)
    worker._tail = b"error:\n\x1b[2J\x00\xff 'quoted' \xe2\x80\xae"
    assert worker.stderr_tail.isprintable()
    assert worker.stderr_tail.startswith("error:\\n\\x1b[2J")
