"""Exported torch programs never run code of their file, in either archive format of torch."""

import io
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cdmpp.errors import InvalidProgramError
from cdmpp.programs.frontends.exported_archive import _is_expression
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


def sizes(text: str) -> Callable[[Path], Change]:
    """An expression of sizes."""

    def change(value: Any) -> Any:
        if isinstance(value, list):
            return [change(item) for item in value]
        if not isinstance(value, dict):
            return value
        return {name: text if name == "expr_str" else change(item) for name, item in value.items()}

    return lambda path: in_graph(lambda document: document.update(change(document)))


def operator(target: str, *values: dict[str, Any]) -> Callable[[Path], Change]:
    inputs = [{"name": "", "arg": value, "kind": 1} for value in values]
    output = {"as_sym_int": {"as_name": "a"}}
    node = {"target": target, "inputs": inputs, "outputs": [output], "metadata": {}, "name": "a"}
    return lambda path: in_graph(lambda document: document["graph_module"]["graph"]["nodes"].insert(0, node))


def squares(path: Path) -> Change:
    """A number that is squared again and again."""
    nodes = []
    for i in range(40):
        given = {"as_sym_int": {"as_name": f"a{i - 1}"}} if i else {"as_int": 9}
        inputs, outputs = [{"name": "", "arg": given, "kind": 1}] * 2, [{"as_sym_int": {"as_name": f"a{i}"}}]
        nodes.append({"target": "_operator.mul", "inputs": inputs, "outputs": outputs, "metadata": {}, "name": f"a{i}"})
    return in_graph(lambda document: document["graph_module"]["graph"]["nodes"].__setitem__(slice(0, 0), nodes))


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
    "matrix": sizes("Matrix(1, 1, print)"),
    "matrix of a text": sizes("Matrix(1,1,S('print'))"),
    "text for sympy": sizes("Max('print')"),
    "debugger": sizes("breakpoint"),
    "tests of sympy": sizes("test"),
    "method": sizes("Integer(1).evalf()"),
    "unknown keyword": sizes("Max(s0, **s1)"),
    "powers of powers": sizes("Pow(Pow(Pow(2, 99), 99), 99)"),
    "large power": sizes("9**999"),
    "power of a power": sizes("2**99**99"),
    "computed power": sizes("PowByNatural(2, Mul(99, 99))"),
    "large shift": sizes("LShift(1, 99999)"),
    "long number": sizes("1" * 21),
    "number with underscores": sizes("1_000"),
    "large float": sizes("1e999999999"),
    "long expression": sizes("s0+" * 333 + "10"),
    "large power of numbers": operator("_operator.pow", {"as_int": 9}, {"as_int": 10**9}),
    "large shift of numbers": operator("_operator.lshift", {"as_int": 1}, {"as_int": 10**12}),
    "long list": operator("_operator.mul", {"as_ints": [1]}, {"as_int": 10**12}),
    "wide text": operator("_operator.mod", {"as_string": "%999999999999d"}, {"as_int": 1}),
    "squares of squares": squares,
    "shift by a size": operator("_operator.lshift", {"as_int": 1}, {"as_sym_int": {"as_name": "n"}}),
    "factorial": operator("math.factorial", {"as_int": 10**9}),
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
    with pytest.raises(InvalidProgramError):
        load_programs(path)
    assert not ran.exists()


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


@pytest.mark.parametrize(
    "text",
    [
        "Add(Pow(Symbol('s17', positive=True, integer=True), Integer(2)), Mul(Integer(-24), Symbol('u0')))",
        "LessThan(Max(Integer(12), Symbol('u0', integer=True)), Integer(99))",
        "FloorDiv(Add(Symbol('s0'), Integer(-1)), Integer(2))",
        "FloorToInt(FloatTrueDiv(ToFloat(Symbol('s0')), Float('1.2999999999999998', precision=53)))",
        "OpaqueUnaryFn_sqrt(Mul(Rational(1, 2), Pow(Symbol('s0'), Rational(1, 2))))",
        "Piecewise(ExprCondPair(Integer(3), Equality(Symbol('s0'), Integer(5))), ExprCondPair(Integer(4), true))",
        "2*s0**2 + s1//2 - s0 % 3",
        "s0 <= 5",
    ],
)
def test_expressions_of_torch_are_read(text: str) -> None:
    assert _is_expression(text)


def test_graph_has_a_bounded_number_of_nodes(archive: Path, tmp_path: Path) -> None:
    nodes: list[dict[str, Any]] = [{}] * 10_001
    many = in_graph(lambda document: document["graph_module"]["graph"].update(nodes=nodes))
    with pytest.raises(InvalidProgramError, match="more than 10,000 nodes"):
        read_exported(changed(archive, tmp_path / "long.pt2", many))


@pytest.mark.slow
@pytest.mark.parametrize("archive", ["new"], indirect=True)
def test_errors_of_torch_are_not_printed(archive: Path, tmp_path: Path) -> None:
    def add(document: dict[str, Any]) -> None:
        graph = document["graph_module"]["graph"]
        inputs = [{"name": name, "arg": {"as_tensor": {"name": "x"}}, "kind": 1} for name in ("self", "mat2")]
        graph["tensor_values"]["a"] = graph["tensor_values"]["x"]
        outputs = [{"as_tensor": {"name": "a"}}]
        node = {
            "target": "torch.ops.aten.mm.default",
            "inputs": inputs,
            "outputs": outputs,
            "metadata": {},
            "name": "a",
        }
        graph["nodes"].insert(0, node)

    path = changed(archive, tmp_path / "shapes.pt2", in_graph(add))
    code = (
        f"import sys; from cdmpp.cli.main import app; app(['predict', {str(path)!r}, '-d', 't4', '--backend', 'tvm'])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert answer.returncode and "Traceback" not in answer.stderr


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_compression_is_refused(archive: Path, tmp_path: Path, method: int) -> None:
    path = changed(archive, tmp_path / "packed.pt2", lambda name, content: content)
    with zipfile.ZipFile(path, "a", method) as file:
        file.writestr("models/other.json", "{}")
    with pytest.raises(InvalidProgramError, match="not packed by deflate"):
        read_exported(path)
