"""TVMScript: what is let through, and that nothing else is."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdmpp.errors import InvalidProgramError
from cdmpp.programs.frontends.tir import _namespace, program_from_tvmscript, programs_from_tir, programs_from_tvmscript
from cdmpp.programs.frontends.tvmscript_check import T_DOTTED, T_NAMES, checked_functions
from cdmpp.programs.program import TensorProgram
from tests.features.matmul import tiled_matmul

HEAD = """from tvm.script import tirx as T
@T.prim_func(s_tir=True)
def f(a: T.Buffer((4,), "float32"), b: T.Buffer((4,), "float32")):
"""
COPY = (
    HEAD
    + """
    for i in range(4):
        with T.sblock("copy"):
            vi = T.axis.spatial(4, i)
            b[vi] = a[vi]
"""
)
TILED = """# from tvm.script import ir as I
# from tvm.script import tirx as T

@I.ir_module
class Module:
    @T.prim_func(s_tir=True)
    def main(A: T.Buffer((64, 64), "float32"), input: T.Buffer((64, 64), "float32"), C: T.Buffer((64, 64), "float32")):
        T.func_attr({"tirx.noalias": True})
        # with T.sblock("root"):
        for i_0, j_0 in T.grid(4, 8):
            for i_1 in T.parallel(16):
                for j_1 in T.vectorized(8):
                    with T.sblock("C_init"):
                        vi = T.axis.spatial(64, i_0 * 16 + i_1)
                        vj = T.axis.spatial(64, j_0 * 8 + j_1)
                        T.reads()
                        T.writes(C[vi, vj])
                        C[vi, vj] = T.float32(0.0)
                for k, j_1 in T.grid(64, 8):
                    with T.sblock("C_update"):
                        vi = T.axis.spatial(64, i_0 * 16 + i_1)
                        vj = T.axis.spatial(64, j_0 * 8 + j_1)
                        vk = T.axis.reduce(64, k)
                        T.reads(C[vi, vj], A[vi, vk], input[vk, vj])
                        T.writes(C[vi, vj])
                        C[vi, vj] = C[vi, vj] + A[vi, vk] * input[vk, vj]
"""

STATEMENTS = [
    '__import__("os").system("true")',
    'open("x")',
    'x = eval("1")',
    'exec("1")',
    "print(1)",
    "T.evaluate(range)",
    "T.__builtins__",
    "T.tvm.x()",
    "T.call_kernel(1)",
    "T.builder.ir",
    "T.evaluate(T)",
    "T.sqrt = 1",
    "x = T.axis",
    "x = T.meta_var(3)",
    "T.inline(1)",
    "T.cuda.func_call('f')",
    "T.call_packed('f')",
    "a.__class__",
    "a.data.x",
    "a.data[0](1)",
    'a[0] = getattr(a, "x")',
    "x = (lambda: 1)()",
    "x = [i for i in range(3)]",
    'x = f"{a}"',
    "x = 2 ** 99",
    "x = 9**9",
    'x = "a" * 10',
    "x = [0] * 1000000000",
    "x = 1 << 99999999",
    "x = [1]",
    "x = {}",
    "x = a.dtype * 1000000000",
    "x = a.shape * 1000000",
    "x = a.shape[0:1]",
    "x = ('%99d' % 1)",
    'x = "a"[0]',
    "x = [1][0]",
    "x = (1 if 1 else [1]) * 99",
    "import os",
    "global x",
    "del a",
    'x = b"1"',
    "x = 1j",
    "x = ...",
    "x = (yield)",
    "(x := 1)",
    "T.evaluate(*[1])",
    "T.evaluate(**{})",
    "x = not_defined",
    "x = a @ b",
    "x: open('x') = 1",
    "assert open('x')",
    "return open",
    "x = y = 1",
    f"x = {2**65}",
    f"x = {'-' * 500}1",
    "x = " + "+".join(["1"] * 500),
    "x = '" + "y" * 5000 + "'",
    "v, *w = T.axis.remap('SS', [1, 2])",
    "v = T.axis.remap('SS', [1, 2])",
    "for q in T.grid(2, 3): pass",
    'for i in __import__("os"): pass',
    'with open("x") as g: pass',
    "def g(): pass",
    "class A: pass",
    "async def g(): pass",
    "if open('x'): pass",
    "try:\n        pass\n    except: pass",
    "for i in range(3): pass\n    else: pass",
]

FILES = [
    "",
    "x",
    "x = 1",
    "class A: pass",
    "import os\n" + COPY,
    'os.system("x")\n' + COPY,
    "from os import system as T\n" + COPY,
    "from tvm.script import tirx\n" + COPY,
    COPY + "\nf()\n",
    '@open("x")\ndef f(): pass\n',
    '@T.prim_func(s_tir=open("x"))\ndef f(): pass\n',
    "@T.prim_func\n@T.prim_func\ndef f(): pass\n",
    "@I.pyfunc\ndef f(): pass",
    "@T.inline\ndef f(): pass",
    "@T.jit\ndef f(): pass",
    "@T.macro\ndef f(): pass",
    "@T.prim_func\ndef f(a): pass",
    "@T.prim_func\ndef f(*a: T.int32): pass",
    '@T.prim_func\ndef f(a: open("x")): pass',
    "@T.prim_func\ndef f(a: T.Buffer((\"__import__('os').system('x')\",), 'float32')): pass",
    "@T.prim_func\ndef f(a: T.Buffer(('open(1)',), 'float32')): pass",
    "@T.prim_func\ndef f(a: T.Buffer(('a.__class__',), 'float32')): pass",
    '@T.prim_func\ndef f(a: T.Buffer((4,), "float32") = open("x")): pass',
    '@T.prim_func\ndef f() -> open("x"): pass',
    "@I.ir_module\nclass A(B):\n  pass",
    '@I.ir_module\nclass A:\n  open("x")',
    '@I.ir_module\nclass A:\n  x = open("x")',
    "@I.ir_module(x=open('y'))\nclass A:\n  pass",
    "(" * 5000,
    "x" * 1_000_001,
    COPY + "\x00",
    "[" + "1," * 60_000 + "]",
]


@pytest.mark.parametrize("statement", STATEMENTS)
def test_hostile_statements_are_refused(statement: str) -> None:
    with pytest.raises(InvalidProgramError) as caught:
        checked_functions(HEAD + "    " + statement + "\n")
    assert "TVM JSON" in caught.value.hint or "at most" in caught.value.hint


@pytest.mark.parametrize("text", FILES, ids=range(len(FILES)))
def test_hostile_files_are_refused(text: str) -> None:
    with pytest.raises(InvalidProgramError):
        checked_functions(text)


@given(st.text(max_size=200))
@settings(max_examples=200)
def test_any_text_is_read_or_refused(text: str) -> None:
    with pytest.raises(InvalidProgramError):
        checked_functions(text)


@given(st.integers(0, len(TILED) - 1), st.sampled_from("()[]{}.,:=*+-_'\"ax1 \n@"))
@settings(max_examples=200)
def test_damaged_programs_are_read_or_refused(at: int, char: str) -> None:
    try:
        checked_functions(TILED[:at] + char + TILED[at + 1 :])
    except InvalidProgramError as error:
        assert error.hint


def test_programs_pass_and_keep_their_names() -> None:
    assert [name for name, _ in checked_functions(COPY)] == ["f"]
    assert [name for name, _ in checked_functions(TILED)] == ["main"]


@pytest.mark.tvm
def test_listed_constructs_are_no_modules_and_run_nothing() -> None:
    import types

    from tvm.script import tirx

    values = [getattr(tirx, name) for name in T_NAMES if hasattr(tirx, name)]
    values += [getattr(getattr(tirx, g), n) for g, names in T_DOTTED.items() for n in names]
    assert len(values) > 150
    for value in values:
        assert not isinstance(value, types.ModuleType)
        home = getattr(value, "__module__", "tvm") or "tvm"
        assert home.split(".")[0] in ("tvm", "tvm_ffi", "functools"), value


@pytest.mark.tvm
@pytest.mark.parametrize("text", [COPY, TILED], ids=["copy", "tiled"])
def test_script_json_and_object_have_one_hash(text: str) -> None:
    import tvm

    program = program_from_tvmscript(text)
    function = tvm.ir.load_json(program.tvm_json)
    module = tvm.IRModule({"main": function})
    again = program_from_tvmscript(module.script())
    (from_object,) = programs_from_tir(module)
    from_json = TensorProgram.from_tvm_json(tvm.ir.save_json(module))
    assert program.backend == "tvm"
    assert program.hash == again.hash == from_object.hash == from_json.hash


@pytest.mark.tvm
@pytest.mark.parametrize("gpu", [False, True])
def test_scheduled_modules_have_one_hash_too(gpu: bool) -> None:
    # Schedules share subexpressions and order annotations otherwise than the parser does.
    schedule, block, loops = tiled_matmul()
    if gpu:
        schedule.bind(schedule.fuse(loops["i0"], loops["j0"]), "blockIdx.x")
        schedule.bind(loops["j1"], "threadIdx.x")
        schedule.annotate(loops["k0"], "pragma_unroll_explicit", 1)
        schedule.annotate(loops["k0"], "pragma_auto_unroll_max_step", 64)
        schedule.annotate(block, "meta_schedule.thread_extent_low_inclusive", 16)
        schedule.annotate(block, "meta_schedule.thread_extent_high_inclusive", 1024)
    else:
        schedule.parallel(loops["i0"])
        schedule.vectorize(loops["j1"])
        schedule.decompose_reduction(block, loops["k0"])
    (from_object,) = programs_from_tir(schedule.mod)
    assert program_from_tvmscript(schedule.mod.script()).hash == from_object.hash


@pytest.mark.tvm
def test_parsed_function_equals_tvm_parser_output() -> None:
    import tvm
    from tvm_ffi import structural_equal

    ours = tvm.ir.load_json(program_from_tvmscript(TILED).tvm_json)
    assert structural_equal(ours, tvm.script.from_source(TILED)["main"])


@pytest.mark.tvm
@pytest.mark.parametrize("expression", ["open('x')", "T.builder", "eval", "T.meta_var(1)", "T.cuda.func_call('f')"])
def test_the_second_lock_holds_without_the_first(expression: str) -> None:
    import tvm

    text = HEAD + f"    T.evaluate({expression})\n"
    with pytest.raises(Exception, match=r"not callable|no attribute|Expect|_Nothing|error"):
        tvm.script.from_source(text, extra_vars=_namespace())


@pytest.mark.tvm
def test_several_functions_give_several_programs() -> None:
    text = COPY + COPY.replace("def f", "def g").replace("(4,)", "(8,)").replace("4", "8")
    programs = programs_from_tvmscript(text)
    assert [p.name for p in programs] == ["f", "g"]
    assert programs[0].hash != programs[1].hash
    with pytest.raises(InvalidProgramError, match="2 functions"):
        program_from_tvmscript(text)
    with pytest.raises(InvalidProgramError, match="no TIR"):
        programs_from_tir(3)


@pytest.mark.tvm
@pytest.mark.parametrize(
    "statement",
    [
        "T.evaluate(1 // 0)",
        "b[0, 0, 0] = 1.0",
        "T.block('x')",
        "T.float32('abc')",
        "a[0] = T.Cast('nope', 1)",
        "for i in T.thread_binding(4, thread='bogus.q'): pass",
        "x = T.axis.spatial(4, a)",
        "pass",
    ],
)
def test_nonsense_that_is_harmless_is_refused_or_read(statement: str) -> None:
    try:
        programs: list[Any] = programs_from_tvmscript(HEAD + "    " + statement + "\n")
    except InvalidProgramError as error:
        assert error.hint and "\n" not in str(error)
    else:
        assert json.loads(programs[0].tvm_json)


#: As TVM 0.8 to 0.26 print a function with blocks.
FORMER = """
{imports}
{module}
    {decorator}
    def main(a: T.handle, C: T.Buffer{buffer}) -> None:
        T.func_attr({{"global_symbol": "main", "tir.noalias": True}})
        A = T.match_buffer(a, [16, 16], dtype="float32")
        D = T.alloc_buffer((16, 16), dtype="float32")
        for i, j, k in T.grid(16, 16, 16):
            with T.block("D"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                with T.init():
                    D[vi, vj] = T.float32(0)
                D[vi, vj] = D[vi, vj] + A[vi, vk] * A[vk, vj]
        for i, j in T.grid(16, 16):
            with T.block("C"):
                T.block_attr({{"key": 1}})
                vi = T.axis.spatial(16, i)
                vj = T.axis.spatial(16, j)
                T.reads(D[vi, vj])
                T.writes(C[vi, vj])
                C[vi, vj] = T.exp(D[vi, vj])
"""


@pytest.mark.parametrize("decorator", ["@T.prim_func", "@T.prim_func()", "@T.prim_func(check_well_formed=False)"])
@pytest.mark.parametrize(
    ("imports", "module", "buffer"),
    [
        ("import tvm\nfrom tvm.script import tir as T", "@tvm.script.ir_module\nclass M:", '[(16, 16), "float32"]'),
        (
            "import tvm.script\nfrom tvm.script import tir as T",
            "@tvm.script.ir_module\nclass M:",
            '[(16, 16), "float32"]',
        ),
        ("from tvm.script import ir as I, tir as T", "@I.ir_module\nclass M:", '((16, 16), "float32")'),
    ],
)
def test_spelling_of_older_tvm_is_read(decorator: str, imports: str, module: str, buffer: str) -> None:
    text = FORMER.format(decorator=decorator, imports=imports, module=module, buffer=buffer)
    today = text.replace("T.block", "T.sblock").replace("T.alloc_buffer", "T.sblock_alloc_buffer")
    today = today.replace(decorator, "@T.prim_func(s_tir=True)")
    [former], [new] = programs_from_tvmscript(text), programs_from_tvmscript(today)
    assert former.hash == new.hash


def test_allocation_of_todays_spelling_keeps_its_name() -> None:
    body = "    with T.sblock('b'):\n        T.evaluate(0)\n    D = T.alloc_buffer((4,), 'float32')\n"
    [(_, text)] = checked_functions("@T.prim_func(s_tir=True)\ndef f():\n" + body)
    assert "T.alloc_buffer" in text
