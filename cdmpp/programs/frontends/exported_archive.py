"""Exported torch programs (``.pt2``) without running code of the file.

``torch.export.load`` unpickles sample inputs and constants, loads compiled libraries, evaluates expressions of sizes,
and calls any function of torch that the program names. Therefore the archive is copied first, with only what a program
needs: its graph, with all names and calls checked, its tensors, and inputs that load with ``weights_only=True``.
"""

from __future__ import annotations

import ast
import io
import json
import re
import shutil
import zipfile
from pathlib import Path
from typing import IO, Any

from cdmpp.errors import InvalidProgramError
from cdmpp.utils.files import MAX_REQUEST_BYTES, check_unpacked, open_file, open_member, parse_json, read_at_most

_HINT = (
    "export with tensors, numbers and texts as inputs; a file that you trust can be passed to cdmpp in Python: "
    "torch.export.load(path)"
)
#: Members: JSON of the graph and of its tensors, what is pickled, and what is copied; others are left out. Those
#: without a folder are of torch up to 2.7.
_JSON = re.compile(r"(.*/)?(models|data/(weights|constants))/[^/]+\.json|serialized_exported_program\.json")
_PICKLED = re.compile(r".*\.pt|serialized_(state_dict|constants)\.json")
_COPIED = re.compile(r".*/data/(weights/weight|constants/tensor)_\d+|(.*/)?(archive_\w+|version|byteorder)")
_CALL = re.compile(
    r"_operator\.(?!(attrgetter|methodcaller|itemgetter|call)$)[a-z]+_?|math\.(?!factorial|comb|perm)[a-z]\w*|torch\._?sym_\w+"
    r"|torch\._C\._set_grad_enabled|torch\.amp\.autocast_mode\._(enter|exit)_autocast"
)
#: Operators, but for those that read or write files; of higher order only those that call graphs of the program.
_OPERATOR = re.compile(
    r"torch\.ops\.(?!aten\.(from_file|save)\b|debugprims\.|higher_order\.)\w+\.\w+(\.\w+)?|torch\.ops\.higher_order\."
    r"(cond|while_loop\w*|scan|associative_scan|map_impl|flex_attention|out_dtype|auto_functionalized\w*|strict_mode"
    r"|invoke_subgraph|hints_wrapper|with_effects|wrap(_with_set_grad_enabled|_with_autocast|_activation_checkpoint)?"
    r"|tag_activation_checkpoint)"
)
#: Texts by their field. torch writes names into Python code, imports classes of pytrees, and evaluates expressions.
_NAME, _OTHER = re.compile(r"\w*"), re.compile(r"[^'\"\\\r\n]*")
_SPEC = re.compile(r"(?s)(?!.*(default_factory|__enum__|\\u))[\w\s.,:{}\[\]\"\\/-]*")
#: Numbers have at most 20 digits, and exponents two.
_EXPRESSION = re.compile(r"(?a)(?!.*(\d{21}|\d[A-DF-Za-df-z_]|\d[eE][+-]?\d{3}))[\w'=.,()+*/%<>! -]{1,1000}")
_TEXT = re.compile(r"[\w.+-]+")
_SYMBOL = re.compile(r"(?a)(s|u|zf|zuf)\d+|[Tt]rue|[Ff]alse|(int_)?oo")
_FUNCTION = re.compile(
    "Integer|Rational|Mul|Add|Max|Min|Mod|PythonMod|FloorDiv|CleanDiv|CeilDiv|(Ceil|Floor|Trunc|Round)ToInt|ceiling|floor"
    "|(Int|Float)TrueDiv|ToFloat|TruncToFloat|RoundDecimal|Where|Eq|Ne|Gt|Lt|Ge|Le|(Une|E)quality|(Strict)?(Less|Greater)Than"
    "|And|Or|Not|Identity|Abs|Piecewise|ExprCondPair|ModularIndexing|OpaqueUnaryFn_[a-z]+2?"
)
#: An exponent, and the largest product of those of an expression.
_EXPONENT, _MAX_POWER = re.compile(r"(?:Integer\(|Rational\()?-?(\d\d?)(?:(?:\.|, | / )\d\d?)?\)?"), 10_000
_MAX_NODES = 10_000
#: Arguments that make an operator of Python take endless time or memory: lists, texts, and large powers.
_UNBOUNDED = re.compile(r'"as_(string|[a-z_]+s)"')
_LARGE = re.compile(r'"as_(int|float)": -?(?!\d{1,2}(\.\d+)?[,}])')
_NAMED = re.compile(r'"as_name": "(\w*)"')
_FIELDS = {
    **dict.fromkeys(("name", "as_name", "forward_arg_names"), _NAME),
    **dict.fromkeys(("in_spec", "out_spec"), _SPEC),
    "path_name": re.compile(r"(weight|tensor)_\d+"),
}
#: Keys of a mapping by its field. torch counts up to the number in the name of a range's symbol.
_KEYS = {"range_constraints": re.compile(r"(?!.*\d{7})[\w *+()/-]*")}


def copy_checked(path: Path, copy: IO[bytes], torch: Any) -> None:
    """Copy a ``.pt2`` file so that ``torch.export.load`` reads the copy without running code of the file.

    Raises InvalidProgramError: the program needs more than tensors, plain values and operators.
    Raises OSError, ValueError or BadZipFile: it is not a regular file, not such an archive, or unpacks to far more
    than its own bytes.
    """
    with open_file(path) as file, zipfile.ZipFile(file) as source, zipfile.ZipFile(copy, "w") as target:
        members = {member.filename: member for member in source.infolist()}
        check_unpacked(sum(member.file_size for member in members.values()), path.stat().st_size)
        for name, member in members.items():
            if _COPIED.fullmatch(name):
                with open_member(source, member) as content, target.open(name, "w", force_zip64=True) as written:
                    shutil.copyfileobj(content, written, 2**20)
                continue
            check = _checked_json if _JSON.fullmatch(name) else _without_pickles if _PICKLED.fullmatch(name) else None
            if check is not None:
                with open_member(source, member) as content:
                    read = read_at_most(content, MAX_REQUEST_BYTES)
                target.writestr(name, check(read, f"{path.name}: {name}", torch))
    copy.seek(0)


def _without_pickles(content: bytes, place: str, torch: Any) -> bytes:
    """Tensors and plain values, written again by torch; empty content stays."""
    if not content:
        return content
    try:
        value = torch.load(io.BytesIO(content), weights_only=True)
    except Exception as error:  # torch and the file's pickle raise a dozen kinds
        refused = re.search(r"GLOBAL (\S+)", str(error))
        what = "content that torch cannot read" if refused is None else refused[1][:200]
        raise _refused(place, f"holds more than tensors and plain values: {what}") from None
    written = io.BytesIO()
    torch.save(value, written)
    return written.getvalue()


def _checked_json(content: bytes, place: str, torch: Any) -> bytes:
    """JSON of a graph or of tensors from which torch runs no other code than operators."""
    document = parse_json(content.decode())
    if isinstance(document, dict) and document.get("guards_code"):
        document["guards_code"] = []  # Python code that would check the inputs of a run
    # Field, value, and whether it is an argument of a call, whose texts torch quotes.
    remaining: list[tuple[str, Any, bool]] = [("", document, False)]
    while remaining:
        field, value, argument = remaining.pop()
        if isinstance(value, list):
            if field == "nodes" and len(value) > _MAX_NODES:
                raise ValueError(f"its graph has more than {_MAX_NODES:,} nodes")
            if field == "nodes":
                _check_powers(value, place)
            remaining += [(field, item, argument) for item in value]
        elif isinstance(value, dict):
            allowed = _KEYS.get(field, _NAME if field.endswith("_values") else _OTHER)
            if wrong := [name for name in value if not allowed.fullmatch(name)]:
                raise _refused(place, f"calls a value {wrong[0][:80]!r}")
            if str(target := value.get("target")).startswith("_operator."):
                given = json.dumps(value.get("inputs"))
                if _UNBOUNDED.search(given) or (str(target).endswith(("pow", "shift")) and _LARGE.search(given)):
                    raise _refused(place, f"calls {target} with {given[:80]}")
            # Metadata of a node are texts that nothing runs.
            remaining += [(n, v, argument or field == "nodes") for n, v in value.items() if n != "metadata"]
        elif field == "use_pickle" and value:
            raise _refused(place, "holds a pickled tensor")
        elif isinstance(value, str):
            if field in ("target", "as_operator"):
                if not _is_operator(value, torch):
                    raise _refused(place, f"calls {value[:80]!r}, which is no operator of torch")
            elif field == "expr_str":
                if not _is_expression(value):
                    raise _refused(place, f"{field} is {value[:80]!r}")
            elif not _FIELDS.get(field, _OTHER).fullmatch(value) and not (argument and field == "as_string"):
                raise _refused(place, f"{field} is {value[:80]!r}")
    return json.dumps(document).encode()


def _is_expression(text: str) -> bool:
    """Whether it is an expression of sizes as torch writes them, with small powers. sympy evaluates it as Python."""
    try:
        remaining = [ast.parse(text if _EXPRESSION.fullmatch(text) else "", mode="eval").body]
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    power = 1
    while remaining:
        match remaining.pop():
            case ast.Call(ast.Name("Symbol" | "Float"), [ast.Constant(str(name))], keywords) if _TEXT.fullmatch(name):
                values = [keyword.value for keyword in keywords if keyword.arg]
                if len(values) < len(keywords) or any(ast.unparse(v) not in ("True", "False", "53") for v in values):
                    return False
            case ast.Call(
                ast.Name("Pow" | "PowByNatural" | "FloatPow" | "LShift" | "RShift"), [base, exponent], []
            ) | ast.BinOp(base, ast.Pow(), exponent):
                matched = _EXPONENT.fullmatch(ast.unparse(exponent))
                power *= max(1, int(matched[1])) if matched else _MAX_POWER + 1
                remaining.append(base)
                if power > _MAX_POWER:
                    return False
            case ast.Call(ast.Name(name), arguments, []) if _FUNCTION.fullmatch(name):
                remaining += arguments
            case ast.BinOp(left, ast.Add() | ast.Sub() | ast.Mult() | ast.Div() | ast.FloorDiv() | ast.Mod(), right):
                remaining += [left, right]
            case ast.Compare(left, _, others):
                remaining += [left, *others]
            case ast.UnaryOp(ast.USub() | ast.UAdd(), operand):
                remaining.append(operand)
            case ast.Name(name) if _SYMBOL.fullmatch(name):
                pass
            case ast.Constant(int() | float()):
                pass
            case _:
                return False
    return True


def _check_powers(nodes: list[dict[str, Any]], place: str) -> None:
    """Refuse products of products, and powers, that make a number of a graph endless."""
    powers: dict[str, int] = {}
    for node in nodes:
        target, inputs = str(node.get("target")), node.get("inputs") or []
        given = [powers.get(name, 1) for name in _NAMED.findall(json.dumps(inputs))]
        power = max(sum(given) if target.endswith(("mul", "lcm")) else 1, *given, 1)
        if target.startswith("_operator.") and target.endswith(("pow", "shift")):
            power *= _MAX_POWER if _NAMED.search(json.dumps(inputs[1:])) else 100
        if power >= _MAX_POWER:
            raise _refused(place, f"calls {target[:80]} for a number of any size")
        powers |= dict.fromkeys(_NAMED.findall(json.dumps(node.get("outputs"))), power)


def _is_operator(name: str, torch: Any) -> bool:
    if not _OPERATOR.fullmatch(name):
        return _CALL.fullmatch(name) is not None
    function = torch.ops
    for part in name.split(".")[2:]:
        function = getattr(function, part, None)
    return isinstance(function, torch._ops.OperatorBase | torch._ops.OpOverloadPacket)


def _refused(place: str, why: str) -> InvalidProgramError:
    return InvalidProgramError(f"{place} {why}; reading it could run code of the file", hint=_HINT)
