"""Validation of TVMScript before TVM's parser evaluates it.

TVM's parser *evaluates* the Python expressions that it meets, with Python's builtins in reach, and
quoted buffer shapes are evaluated too. Text from a stranger is therefore first read with :mod:`ast`
(which runs nothing) and must consist of listed constructs, listed names under ``T`` and bounded
numbers only. What passes is written out anew from the checked tree, so that both parsers see the same.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from cdmpp.errors import InvalidProgramError

MAX_CHARS = 1_000_000
MAX_NODES = 50_000
MAX_DEPTH = 200
MAX_STRING = 4096
MAX_INT = 2**64

HINT = (
    "TVMScript may hold imports of tvm.script, @T.prim_func functions and one @I.ir_module class with "
    "plain T.* constructs; anything else can be passed as TVM JSON (tvm.ir.save_json)"
)

#: Constructs under ``T`` that only build TIR: no Python callbacks, no compilation, no files.
_PLAIN_NAMES = """
    Add And BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Broadcast Buffer BufferLoad Cast Div EQ FloatImm
    FloorDiv FloorMod GE GT If IntImm LE LShift LT Let Max Min Mod Mul NE Not Or RShift Ramp Range Select
    Shuffle Sub Then Else While abs acos acosh address_of alloc_buffer alloc_local alloc_shared asin asinh
    assume atan atan2 atanh attr bitwise_and bitwise_not bitwise_or bitwise_xor bool boolean broadcast
    call_extern call_intrin call_llvm_intrin call_llvm_pure_intrin call_pure_extern cast ceil ceildiv clz
    copysign cos cosh decl_buffer dp4a env_thread erf evaluate exp exp10 exp2 fabs floor floordiv floormod
    fma fmod func_attr grid handle handle_add_byte_offset hypot if_then_else infinity init isfinite isinf
    isnan isnullptr launch_thread ldexp likely log log10 log1p log2 match_buffer max max_value min min_value
    nearbyint nextafter parallel popcount pow prim_func ptr ptr_byte_offset q_multiply_shift
    q_multiply_shift_per_axis ramp reads reinterpret round rsqrt sblock sblock_alloc_buffer sblock_attr
    selector serial shift_left shift_right sigmoid sin sinh sqrt tan tanh target thread_binding thread_return
    trunc truncdiv truncmod tvm_access_ptr tvm_bmma_sync tvm_fill_fragment tvm_load_matrix_sync tvm_mma_sync
    tvm_store_matrix_sync tvm_storage_sync tvm_thread_allreduce tvm_thread_invariant tvm_tuple
    tvm_warp_activemask tvm_warp_shuffle tvm_warp_shuffle_down tvm_warp_shuffle_up tvm_warp_shuffle_xor
    type_annotation undef unroll vectorcombine vectorhigh vectorized vectorlow void vscale where writes
    masked_load masked_store get_active_lane_mask ignore_loop_partition
    bf16 f16 f32 f64 i8 i16 i32 i64 u8 u16 u32 u64
    """
T_NAMES = frozenset(_PLAIN_NAMES.split())
_T_DTYPE = re.compile(r"(u?int|float|bfloat)\d{1,2}(_e\dm\d\w{0,8})?(x\d{1,4})?")
#: Names below a namespace of ``T``.
T_DOTTED = {
    "axis": frozenset({"spatial", "reduce", "scan", "opaque", "remap", "S", "R"}),
    "ptx_legacy": frozenset({"ldmatrix", "mma"}),
    "cuda": frozenset({"mma_fill", "mma_store", "mma_fill_legacy", "mma_store_legacy"}),
}
#: ``T.let`` is an object that is subscripted with a type.
_T_PLAIN = frozenset({"let"})
#: Attributes of buffers, by whether they may stand alone; the others must be subscripted or called.
_BUFFER_VALUES = frozenset({"data", "elem_offset"})
_BUFFER_LISTS = frozenset({"shape", "strides"})
_BUFFER_CALLS = frozenset({"access_ptr", "vload", "vstore"})

_NAME = re.compile(r"[A-Za-z_]\w*")
_SIGNATURE_STRING = re.compile(r"[A-Za-z][\w.\-]{0,63}")

#: Statements, expressions and operators that a function may consist of.
_SYNTAX = """
    For With If While Assign AnnAssign AugAssign Expr Pass Assert Return
    BinOp UnaryOp BoolOp Compare IfExp Call Attribute Subscript Name Constant Tuple List Dict Slice keyword withitem
    Add Sub Mult Div FloorDiv Mod LShift BitAnd BitOr BitXor Invert Not UAdd USub And Or Eq NotEq Lt LtE Gt GtE
    RShift Load Store
    """
_NODES = tuple(getattr(ast, name) for name in _SYNTAX.split())
#: Constructs that TVM 0.27 renamed, and their names today.
_FORMER = {"block": "sblock", "block_attr": "sblock_attr"}
#: Parents under which a string or a display (list, tuple, dictionary) is only handed on.
_HOLDERS = (ast.Call, ast.keyword, ast.Tuple, ast.List, ast.Dict, ast.Subscript, ast.Assert, ast.Expr)


def checked_functions(source: str) -> list[tuple[str, str]]:
    """Name and safe source text of every PrimFunc in a TVMScript module.

    Raises InvalidProgramError: not Python, no PrimFunc, too large, or anything beyond the listed constructs.
    """
    if len(source) > MAX_CHARS:
        raise InvalidProgramError(f"TVMScript of {len(source)} characters", hint=f"at most {MAX_CHARS}")
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise InvalidProgramError(f"TVMScript, line {error.lineno}: {error.msg}", hint=HINT) from None
    except (ValueError, RecursionError, MemoryError) as error:
        what = f"TVMScript cannot be read: {error or 'nested too deeply'}"
        raise InvalidProgramError(what, hint=HINT) from None
    _check_size(tree)
    functions = list(_functions(tree))
    if not functions:
        raise InvalidProgramError("the TVMScript has no @T.prim_func function", hint=HINT)
    checked = []
    for function in functions:
        _rename_former(function)
        _check_function(function)
        checked.append((function.name, ast.unparse(function)))
    return checked


def _rename_former(function: ast.FunctionDef) -> None:
    """Give a function the spelling of TVM 0.27: older ones index T.Buffer, have other names, and do not mark blocks."""
    for argument in function.args.args:
        kind = argument.annotation
        if isinstance(kind, ast.Subscript) and _under_t(kind.value) == "Buffer":
            parts = kind.slice.elts if isinstance(kind.slice, ast.Tuple) else [kind.slice]
            typed = isinstance(parts[-1], ast.Constant) and isinstance(parts[-1].value, str)
            argument.annotation = ast.copy_location(ast.Call(kind.value, parts if typed else [kind.slice], []), kind)
    names = [node for node in ast.walk(function) if isinstance(node, ast.Attribute) and _under_t(node) == node.attr]
    if not any(node.attr in ("block", "sblock") for node in names):
        return
    former = dict(_FORMER)
    for i, decorator in enumerate(function.decorator_list):
        call = decorator if isinstance(decorator, ast.Call) else ast.Call(decorator, [], [])
        if ast.unparse(call.func) == "T.prim_func" and "s_tir" not in [k.arg for k in call.keywords]:
            call.keywords.append(ast.keyword("s_tir", ast.Constant(True)))
            function.decorator_list[i] = ast.copy_location(call, decorator)
            former["alloc_buffer"] = "sblock_alloc_buffer"
    for node in names:
        node.attr = former.get(node.attr, node.attr)


def _refuse(node: ast.AST, what: str) -> InvalidProgramError:
    return InvalidProgramError(f"TVMScript, line {getattr(node, 'lineno', '?')}: {what}", hint=HINT)


def _check_size(tree: ast.AST) -> None:
    count, stack = 0, [(tree, 0)]
    while stack:
        node, depth = stack.pop()
        count += 1
        if count > MAX_NODES:
            raise InvalidProgramError("the TVMScript is too long", hint=f"at most {MAX_NODES} syntax nodes")
        if depth > MAX_DEPTH:
            raise _refuse(node, f"nested deeper than {MAX_DEPTH} levels")
        stack.extend((child, depth + 1) for child in ast.iter_child_nodes(node))


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    for node in tree.body:
        if isinstance(node, ast.ImportFrom | ast.Import):
            _check_import(node)
        elif isinstance(node, ast.FunctionDef):
            yield node
        elif isinstance(node, ast.ClassDef):
            yield from _class_functions(node)
        elif not _is_docstring(node):
            raise _refuse(node, f"{type(node).__name__} outside a function")


def _check_import(node: ast.Import | ast.ImportFrom) -> None:
    """Imports are not carried out: ``T`` and ``I`` are what they say whatever the text imports."""
    if isinstance(node, ast.Import):
        fine = all(alias.name in ("tvm", "tvm.script") for alias in node.names)
    else:
        fine = node.level == 0 and node.module in ("tvm.script", "tvm.script.parser")
        fine = fine and all(
            (alias.name, alias.asname) in {("tirx", "T"), ("tir", "T"), ("ir", "I"), ("relax", "R")}
            for alias in node.names
        )
        axis = node.module == "tvm.tirx.layout" and [alias.name for alias in node.names] == ["Axis"]
        fine = fine or (node.level == 0 and axis)
    if not fine:
        raise _refuse(node, f"import other than 'from tvm.script import tirx as T': {ast.unparse(node)[:80]}")


def _class_functions(node: ast.ClassDef) -> Iterator[ast.FunctionDef]:
    decorators = [ast.unparse(_called(d)) for d in node.decorator_list]
    if decorators not in (["I.ir_module"], ["tvm.script.ir_module"]) or node.bases or node.keywords:
        raise _refuse(node, f"class {node.name!r} is not a plain @I.ir_module class")
    for decorator in node.decorator_list:
        _check_decorator(decorator)
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef):
            yield statement
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            # I.module_attrs({...}) does not describe a program; it is checked and dropped.
            if ast.unparse(statement.value.func) not in ("I.module_attrs", "I.module_global_infos"):
                raise _refuse(statement, "a call inside the class")
        elif not _is_docstring(statement) and not isinstance(statement, ast.Pass):
            raise _refuse(statement, f"{type(statement).__name__} inside the class")


def _is_docstring(node: ast.stmt) -> bool:
    text = node.value if isinstance(node, ast.Expr) else None
    return isinstance(text, ast.Constant) and isinstance(text.value, str)


def _called(decorator: ast.expr) -> ast.expr:
    return decorator.func if isinstance(decorator, ast.Call) else decorator


def _check_decorator(decorator: ast.expr) -> None:
    if isinstance(decorator, ast.Call):
        plain = all(
            k.arg in ("private", "check_well_formed", "s_tir", "persistent")
            and isinstance(k.value, ast.Constant)
            and isinstance(k.value.value, bool)
            for k in decorator.keywords
        )
        if decorator.args or not plain:
            raise _refuse(decorator, "a decorator takes the flags private, s_tir and check_well_formed only")


def _check_function(function: ast.FunctionDef) -> None:
    decorators = [ast.unparse(_called(d)) for d in function.decorator_list]
    if decorators != ["T.prim_func"]:
        shown = ", ".join(decorators)[:80] or "none"
        what = f"function {function.name!r} is not a plain @T.prim_func (decorators: {shown})"
        raise _refuse(function, what)
    _check_decorator(function.decorator_list[0])
    arguments = function.args
    if arguments.vararg or arguments.kwarg or arguments.kwonlyargs or arguments.posonlyargs:
        raise _refuse(function, "parameters other than plain ones")
    if arguments.defaults or getattr(function, "type_params", None):
        raise _refuse(function, "default values or type parameters")
    names = {a.arg for a in arguments.args} | {"T", "range"}
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    for argument in arguments.args:
        if argument.annotation is None:
            raise _refuse(argument, f"parameter {argument.arg!r} has no type")
        # Quoted dimensions declare the variables that they name.
        names |= _signature_strings(argument.annotation)
    for name in names:
        _check_identifier(function, name)
    for root in [*(a.annotation for a in arguments.args), function.returns]:
        if root is not None:
            _check_tree(root, None, names)
    for statement in function.body:
        _check_tree(statement, None, names)


def _signature_strings(annotation: ast.expr) -> set[str]:
    """TVM evaluates quoted dimensions: only single names are let through."""
    names = set()
    for node in ast.walk(annotation):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if not _SIGNATURE_STRING.fullmatch(node.value) or "__" in node.value:
                raise _refuse(node, f"quoted text {node.value[:40]!r} in a parameter's type")
            names.add(node.value.split(".")[0].split("-")[0])
    return names


def _check_identifier(node: ast.AST, name: str) -> None:
    if not _NAME.fullmatch(name) or "__" in name or len(name) > 512:
        raise _refuse(node, f"the name {name[:40]!r}")


def _check_tree(root: ast.AST, parent: ast.AST | None, names: set[str]) -> None:
    stack: list[tuple[ast.AST, ast.AST | None]] = [(root, parent)]
    while stack:
        node, above = stack.pop()
        _check_node(node, above, names)
        if isinstance(node, ast.Attribute):
            if (name := _under_t(node)) is not None:
                _check_t_name(node, name)
                continue  # the chain is checked as a whole
            stack.append((node.value, node))
        else:
            stack.extend((child, node) for child in ast.iter_child_nodes(node))


def _check_node(node: ast.AST, parent: ast.AST | None, names: set[str]) -> None:
    if not isinstance(node, _NODES):
        place = node if hasattr(node, "lineno") else (parent or node)
        raise _refuse(place, f"{type(node).__name__} is not allowed")
    if isinstance(node, ast.Name):
        _check_identifier(node, node.id)
        if node.id not in names:
            raise _refuse(node, f"the name {node.id!r} is not defined in the function")
        is_called = isinstance(node.ctx, ast.Load) and isinstance(parent, ast.Call) and parent.func is node
        if node.id == "T" or (node.id == "range" and not is_called):
            raise _refuse(node, f"{node.id!r} stands alone")
    elif isinstance(node, ast.Constant):
        _check_constant(node, parent)
    elif isinstance(node, ast.List | ast.Tuple | ast.Dict):
        target = isinstance(getattr(node, "ctx", None), ast.Store)
        if not target and not isinstance(parent, _HOLDERS):
            raise _refuse(node, f"a {type(node).__name__.lower()} outside arguments and indices")
        if isinstance(parent, ast.Subscript) and parent.value is node:
            raise _refuse(node, "an indexed literal")
    elif isinstance(node, ast.Attribute):
        _check_attribute(node, parent)
    elif isinstance(node, ast.Call):
        if not isinstance(node.func, ast.Attribute | ast.Name):
            raise _refuse(node, "a call of something that is not a T construct")
        if isinstance(node.func, ast.Name) and not (node.func.id == "range" and isinstance(parent, ast.For)):
            raise _refuse(node, f"a call of {node.func.id!r}")
        if any(k.arg is None for k in node.keywords):
            raise _refuse(node, "** arguments")
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.LShift | ast.RShift):
        right = node.right.value if isinstance(node.right, ast.Constant) else None
        if not isinstance(right, int) or not 0 <= right < 64:
            raise _refuse(node, "a shift by something other than 0 to 63 (use T.shift_left)")
    elif isinstance(node, ast.Assign):
        _check_assign(node)
    elif isinstance(node, ast.For):
        grid = isinstance(node.iter, ast.Call) and _under_t(node.iter.func) == "grid"
        if grid and isinstance(node.target, ast.Name) and len(node.iter.args) != 1:  # type: ignore[attr-defined]
            raise _refuse(node, "T.grid needs one variable per axis")
    if isinstance(node, ast.For | ast.While) and node.orelse:
        raise _refuse(node, "else of a loop")


def _check_assign(node: ast.Assign) -> None:
    # A single name bound to a Python list could be multiplied to any length.
    if len(node.targets) != 1:
        raise _refuse(node, "a chained assignment")
    many = isinstance(node.value, ast.Call) and _under_t(node.value.func) == "axis.remap"
    if many and not isinstance(node.targets[0], ast.Tuple | ast.List):
        if not isinstance(node.value, ast.Call) or len(node.value.args) != 2:
            raise _refuse(node, "T.axis.remap takes two arguments")
        axes = node.value.args[1]
        if not isinstance(axes, ast.List) or len(axes.elts) != 1:
            raise _refuse(node, "T.axis.remap needs one variable per axis")


def _check_constant(node: ast.Constant, parent: ast.AST | None) -> None:
    value = node.value
    if isinstance(value, str):
        if len(value) > MAX_STRING:
            raise _refuse(node, f"a text of {len(value)} characters")
        indexed = isinstance(parent, ast.Subscript) and parent.value is node
        if not isinstance(parent, _HOLDERS) or indexed:
            raise _refuse(node, "text outside arguments")
    elif isinstance(value, bool | float) or value is None:
        return
    elif not isinstance(value, int):
        raise _refuse(node, f"a constant of type {type(value).__name__}")
    elif abs(value) > MAX_INT:
        raise _refuse(node, "an integer beyond 64 bits")


def _check_attribute(node: ast.Attribute, parent: ast.AST | None) -> None:
    """Attributes of local variables: the few that TVM prints."""
    if _under_t(node) is not None:
        return
    if not isinstance(node.value, ast.Name) or not isinstance(node.ctx, ast.Load):
        raise _refuse(node, f"the attribute {node.attr!r}")
    called = isinstance(parent, ast.Call) and parent.func is node
    subscripted = isinstance(parent, ast.Subscript) and parent.value is node
    fine = (
        (node.attr in _BUFFER_VALUES and not called)
        or (node.attr in _BUFFER_LISTS and subscripted and not isinstance(parent.slice, ast.Slice))  # type: ignore[union-attr]
        or (node.attr in _BUFFER_CALLS and called)
    )
    if not fine:
        raise _refuse(node, f"the attribute {node.attr!r}")


def _under_t(node: ast.AST) -> str | None:
    """``"axis.remap"`` for ``T.axis.remap``; None for what does not start at T."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name) and node.id == "T" and parts:
        return ".".join(reversed(parts))
    return None


def _check_t_name(node: ast.Attribute, name: str) -> None:
    if not isinstance(node.ctx, ast.Load):
        raise _refuse(node, f"an assignment to T.{name}")
    first, _, rest = name.partition(".")
    known = name in T_NAMES or name in _T_PLAIN or bool(_T_DTYPE.fullmatch(name))
    if not known and rest not in T_DOTTED.get(first, ()):
        raise _refuse(node, f"T.{name[:60]} is not one of the constructs that are read")
