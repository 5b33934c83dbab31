"""Exported torch programs never run code of their file, in either archive format of torch."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cdmpp.cli.main import app
from cdmpp.errors import InvalidProgramError
from cdmpp.programs.frontends.load import load_programs
from cdmpp.programs.frontends.relax_programs import read_exported

torch = pytest.importorskip("torch", reason="needs torch")
pytestmark = pytest.mark.timeout(300)
Change = Callable[[str, bytes], bytes | None]


class Touch:
    """A pickle that creates a file where it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.path), "w")


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: Any, mode: str = "reflect") -> Any:
        padded = torch.nn.functional.pad(self.linear(x)[None], (1, 1), mode=mode)[0]
        with torch.no_grad():
            return torch.einsum("ij,kj->ik", padded, padded) + torch.tensor(2.0)


@pytest.fixture(scope="module")
def program() -> Any:
    batch = 2 * torch.export.Dim("half", max=32)
    return torch.export.export(Small().eval(), (torch.ones(4, 8), "reflect"), dynamic_shapes=({0: batch}, None))


@pytest.fixture(scope="module", params=["new", "old"])
def archive(request: pytest.FixtureRequest, program: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file as torch writes it, or as torch up to 2.7 wrote it."""
    path: Path = tmp_path_factory.mktemp("archive") / f"{request.param}.pt2"
    if request.param == "new":
        torch.export.save(program, path)
        return path
    from torch._export.serde.schema import SCHEMA_VERSION
    from torch._export.serde.serialize import serialize

    parts = serialize(program)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("version", ".".join(map(str, SCHEMA_VERSION)))
        file.writestr("serialized_exported_program.json", parts.exported_program)
        for name in ("state_dict", "constants", "example_inputs"):
            file.writestr(f"serialized_{name}.pt", getattr(parts, name))
    return path


def changed(source: Path, target: Path, change: Change) -> Path:
    with zipfile.ZipFile(source) as read, zipfile.ZipFile(target, "w") as written:
        for name in read.namelist():
            content = change(name, read.read(name))
            if content is not None:
                written.writestr(name, content)
    return target


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def in_graph(change: Callable[[dict[str, Any]], object]) -> Change:
    def apply(name: str, content: bytes) -> bytes:
        if not name.endswith(("models/model.json", "exported_program.json")):
            return content
        document = json.loads(content)
        change(document)
        return json.dumps(document).encode()

    return apply


def call(target: str) -> Callable[[Path], Change]:
    def of(path: Path) -> Change:
        arguments = [{"name": "", "arg": {"as_string": f"touch {path}"}, "kind": 1}]
        node = {"target": target, "inputs": arguments, "outputs": [{"as_none": True}], "metadata": {}, "name": "a"}
        return in_graph(lambda document: document["graph_module"]["graph"]["nodes"].insert(0, node))

    return of


def replaced(old: str, new: str) -> Callable[[Path], Change]:
    def of(path: Path) -> Change:
        code = f"__import__('os').system('touch {path}')"

        def apply(name: str, content: bytes) -> bytes:
            return content.replace(old.encode(), new.format(code).encode()) if name.endswith(".json") else content

        return apply

    return of


def pickled(*endings: str, wrap: Callable[[Any], Any] = lambda value: value) -> Callable[[Path], Change]:
    return lambda path: lambda name, content: saved(wrap(Touch(path))) if name.endswith(endings) else content


def opaque(path: Path) -> Change:
    import pickle

    def apply(name: str, content: bytes) -> bytes:
        if name.endswith("constants/tensor_0"):
            return pickle.dumps(Touch(path))
        return content.replace(b"tensor_0", b"opaque_obj_0") if name.endswith("constants_config.json") else content

    return apply


def as_pickle(path: Path) -> Change:
    def apply(name: str, content: bytes) -> bytes:
        if name.endswith(("weights/weight_0", "constants/tensor_0")):
            return saved(Touch(path))
        return content.replace(b'"use_pickle": false', b'"use_pickle": true') if "_config.json" in name else content

    return apply


ATTACKS: dict[str, Callable[[Path], Change]] = {
    "sample inputs": pickled("sample_inputs/model.pt", "example_inputs.pt", wrap=lambda value: ((value,), {})),
    "constants": pickled("constants.pt", wrap=lambda value: {"c": value}),
    "weights": pickled("state_dict.pt", wrap=lambda value: {"w": value}),
    "pickled tensors": as_pickle,
    "opaque constant": opaque,
    "function of torch": call("torch.os.system"),
    "bound method": call("torch.ops.load_library.__call__"),
    "library": call("torch.ops.load_library"),
    "methodcaller": call("_operator.methodcaller"),
    "file": call("torch.ops.aten.from_file.default"),
    "expression": replaced("Symbol('s", "{0} + Symbol('s"),
    "name": replaced('"x"', '"x={0}"'),
    "class of a pytree": replaced("builtins.tuple", "collections.defaultdict default_factory {0}"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_code_of_a_file_is_not_run(archive: Path, tmp_path: Path, attack: str) -> None:
    ran = tmp_path / "ran"
    path = changed(archive, tmp_path / "evil.pt2", ATTACKS[attack](ran))
    with zipfile.ZipFile(archive) as before, zipfile.ZipFile(path) as after:
        if all(before.read(name) == after.read(name) for name in before.namelist()):
            pytest.skip("the format has no such part")
    with pytest.raises(InvalidProgramError, match="could run code of the file") as caught:
        read_exported(path)
    assert caught.value.hint
    answer = CliRunner().invoke(app, ["predict", str(path), "-d", "t4"])
    assert answer.exit_code != 0 and not ran.exists()


def test_conditions_on_inputs_are_not_run(archive: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    conditions = [f"__import__('pathlib').Path({str(ran)!r}).touch() is None"]
    path = changed(archive, tmp_path / "guards.pt2", in_graph(lambda graph: graph.update(guards_code=conditions)))
    assert load_programs(path).programs and not ran.exists()


def test_compiled_libraries_are_left_out(archive: Path, tmp_path: Path) -> None:
    path = tmp_path / "library.pt2"
    path.write_bytes(archive.read_bytes())
    with zipfile.ZipFile(path, "a") as file:
        root = file.namelist()[0].partition("/")[0]
        file.writestr(f"{root}/data/aotinductor/model/model.so", b"\x7fELF")
    assert load_programs(path).programs


def test_programs_and_weights_are_those_of_torch(archive: Path, program: Any) -> None:
    read = read_exported(archive)
    assert str(read.graph) == str(torch.export.load(archive).graph)
    torch.testing.assert_close(read.state_dict, program.state_dict)
    x = torch.rand(6, 8)
    torch.testing.assert_close(read.module()(x, "reflect"), program.module()(x, "reflect"))
