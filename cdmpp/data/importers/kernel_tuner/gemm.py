"""CLBlast's matrix product "xgemm" (kernel 0), brute-forced by Kernel Tuner: one scheduled program per configuration.

C[n, m] = alpha * sum over k of A[k, m] * B[k, n] + beta * C[n, m] in float32, the matrices as the kernel stores them.
A block computes a tile of MWG x NWG results with MDIMC x NDIMC threads, KWG steps of k at a time.

===============  ========================================================================================
parameter        in the program
===============  ========================================================================================
MWG, NWG         tile of ``blockIdx.x`` and ``blockIdx.y``
MDIMC, NDIMC     extents of ``threadIdx.x`` and ``threadIdx.y``; a thread holds MWG/MDIMC x NWG/NDIMC sums
KWG, KWI         loops ``k_tile`` (K/KWG), ``k_step`` (KWG/KWI) and the unrolled ``k_unroll`` (KWI)
SA, SB           1: the tile of A or B is staged in shared memory, KWG x MWG or KWG x NWG floats
MDIMA, NDIMB     width of the threads while they stage a tile; without staging they have no effect
VWM, VWN         vector width of accesses to A and C (VWM), and to B (VWN)
STRM, STRN       vectors of a thread are neighbours (0), or interleave with those of the other threads (1)
PRECISION        32
===============  ========================================================================================

Source of these facts: CLBlast, ``src/kernels/level3/xgemm_part1.opencl`` to ``xgemm_part3.opencl``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cdmpp.data.importers.kernel_tuner.template import Builder, LaunchShape, Parameters, PrimFunc, TunedKernel

#: Rows and columns of the matrices in the public table.
SIZE = 4096
PARAMETERS = (
    *("MWG", "NWG", "KWG", "MDIMC", "NDIMC", "MDIMA", "NDIMB", "KWI"),
    *("VWM", "VWN", "STRM", "STRN", "SA", "SB", "PRECISION"),
)
_SWITCHES = ("STRM", "STRN", "SA", "SB")


@dataclass(frozen=True)
class Side:
    """Schedule of one input along its own dimension: A along m, or B along n.

    ``tile`` elements of a block are covered by ``threads``, and by ``staging`` threads during staging, in vectors of
    ``vector`` elements.
    """

    name: str
    tile: int
    threads: int
    staging: int
    vector: int
    strided: bool
    staged: bool

    @property
    def each(self) -> int:
        """Elements of a thread."""
        return self.tile // self.threads

    def element(self, vector: Any, lane: Any, thread: Any, threads: int) -> Any:
        """Position in the tile of a lane of a thread's vector."""
        per_thread = self.tile // threads // self.vector
        place = thread + vector * threads if self.strided else vector + thread * per_thread
        return place * self.vector + lane


def sides(parameters: Parameters) -> tuple[Side, Side]:
    """Schedules of A and B."""
    p = parameters
    return (
        Side("A", p["MWG"], p["MDIMC"], p["MDIMA"], p["VWM"], p["STRM"] == 1, p["SA"] == 1),
        Side("B", p["NWG"], p["NDIMC"], p["NDIMB"], p["VWN"], p["STRN"] == 1, p["SB"] == 1),
    )


def inexpressible(parameters: Parameters, size: int = SIZE) -> str:
    """Return why a configuration is not one of the kernel; "" if it is one."""
    p = parameters
    if p["PRECISION"] != 32:
        return "precision other than float32"
    if any(p[name] not in (0, 1) for name in _SWITCHES):
        return "switch other than 0 and 1"
    if any(p[name] < 1 for name in PARAMETERS if name not in _SWITCHES):
        return "size below 1"
    threads = p["MDIMC"] * p["NDIMC"]
    whole = size % p["KWG"] == 0 and p["KWG"] % p["KWI"] == 0
    for side in sides(p):
        whole &= size % side.tile == 0 and side.tile % (side.threads * side.vector) == 0
        whole &= side.tile % (side.staging * side.vector) == 0 and threads % side.staging == 0
        whole = whole and p["KWG"] % (threads // side.staging) == 0
        if side.staging % p["MDIMC"] and p["MDIMC"] % side.staging:
            return "thread shapes that do not divide each other"
    return "" if whole else "sizes that do not divide each other"


def launch(parameters: Parameters, size: int = SIZE) -> LaunchShape:
    """Compute blocks, threads and shared memory of a configuration."""
    m, n = sides(parameters)
    floats = parameters["KWG"] * (m.staged * m.tile + n.staged * n.tile)
    return LaunchShape((size // m.tile, size // n.tile, 1), (m.threads, n.threads, 1), 4 * floats)


def canonical(parameters: Parameters) -> Parameters:
    """Set the thread shapes of inputs that are not staged to those of the computation."""
    unstaged = {} if parameters["SA"] else {"MDIMA": parameters["MDIMC"]}
    return {**parameters, **unstaged, **({} if parameters["SB"] else {"NDIMB": parameters["NDIMC"]})}


def build(parameters: Parameters, size: int = SIZE) -> PrimFunc:
    """Build the program of a configuration for which :func:`inexpressible` returns "". ``size``: rows and columns of
    the matrices; tests use small ones."""
    with Builder("xgemm") as ir:
        _GemmProgram(ir, parameters, size).write()
    return ir.function


class _GemmProgram:
    """The statements of one configuration."""

    def __init__(self, ir: Builder, parameters: Parameters, size: int) -> None:
        self.ir, self.p, self.size = ir, parameters, size
        self.m, self.n = sides(parameters)
        self.alpha, self.beta = ir.scalar("alpha"), ir.scalar("beta")
        self.matrix = {name: ir.parameter(name, (size, size)) for name in "ABC"}
        self.sums = ir.allocate("C_local", (self.n.each, self.m.each), "local")
        self.local = {side.name: ir.allocate(f"{side.name}_local", (side.each,), "local") for side in (self.m, self.n)}
        self.tile = {
            side.name: ir.allocate(f"{side.name}_shared", (parameters["KWG"], side.tile), "shared")
            for side in (self.m, self.n)
            if side.staged
        }

    def write(self) -> None:
        """Write the program."""
        p, m, n, kwg = self.p, self.m, self.n, self.p["KWG"]
        grid = launch(p, self.size).grid
        threads = (
            *(("bx", "blockIdx.x", grid[0]), ("by", "blockIdx.y", grid[1])),
            *(("tx", "threadIdx.x", m.threads), ("ty", "threadIdx.y", n.threads)),
        )
        with self.ir.loops(*threads) as (bx, by, tx, ty):
            self._clear()
            with self.ir.loops(("k_tile", "serial", self.size // kwg)) as (k_tile,):
                for side, group in ((m, bx), (n, by)):
                    if side.staged:
                        self._stage(side, k_tile, group, tx, ty)
                steps = (("k_step", "serial", kwg // p["KWI"]), ("k_unroll", "unroll", p["KWI"]))
                with self.ir.loops(*steps) as (k_step, k_unroll):
                    k = k_step * p["KWI"] + k_unroll
                    self._fetch(m, k_tile, k, bx, tx)
                    self._fetch(n, k_tile, k, by, ty)
                    self._update(k_tile * kwg + k)
            self._write_back(bx, by, tx, ty)

    def _clear(self) -> None:
        m, n = self.m, self.n
        with (
            self.ir.loops(("m", "unroll", m.each), ("n", "unroll", n.each)) as (i, j),
            self.ir.block("C_init", ("S", n.each, j), ("S", m.each, i)) as at,
        ):
            self.ir.store(self.sums, at, self.ir.zero())

    def _stage(self, side: Side, k_tile: Any, group: Any, tx: Any, ty: Any) -> None:
        """Copy a tile from global to shared memory: KWG rows, shared by rows of ``side.staging`` threads."""
        kwg, width = self.p["KWG"], self.m.threads
        if side.staging >= width:
            ratio = side.staging // width
            column, row = tx + ty % ratio * width, ty // ratio
        else:
            ratio = width // side.staging
            column, row = tx % side.staging, ty * ratio + tx // side.staging
        rows = kwg // (width * self.n.threads // side.staging)
        loops = (
            ("vector", "unroll", side.tile // side.staging // side.vector),
            ("k_own", "unroll", rows),
            ("lane", "vectorized", side.vector),
        )
        with self.ir.loops(*loops) as (vector, k_own, lane):
            element = side.element(vector, lane, column, side.staging)
            axes = (("S", kwg, k_own + row * rows), ("S", side.tile, element))
            outer = (("S", self.size // kwg, k_tile), ("S", self.size // side.tile, group))
            with self.ir.block(f"{side.name}_shared", *outer, *axes) as (v_tile, v_group, k, e):
                value = self.matrix[side.name][v_tile * kwg + k, v_group * side.tile + e]
                self.ir.store(self.tile[side.name], (k, e), value)

    def _fetch(self, side: Side, k_tile: Any, k: Any, group: Any, thread: Any) -> None:
        """Copy a thread's elements of one k from shared or global memory to registers."""
        kwg = self.p["KWG"]
        loops = (("vector", "unroll", side.each // side.vector), ("lane", "vectorized", side.vector))
        with self.ir.loops(*loops) as (vector, lane):
            element = side.element(vector, lane, thread, side.threads)
            axes = (("S", kwg, k), ("S", side.tile, element), ("S", side.each, vector * side.vector + lane))
            if side.staged:
                with self.ir.block(f"{side.name}_local", *axes) as (k, e, register):
                    self.ir.store(self.local[side.name], (register,), self.tile[side.name][k, e])
                return
            outer = (("S", self.size // kwg, k_tile), ("S", self.size // side.tile, group))
            with self.ir.block(f"{side.name}_local", *outer, *axes) as (v_tile, v_group, k, e, register):
                value = self.matrix[side.name][v_tile * kwg + k, v_group * side.tile + e]
                self.ir.store(self.local[side.name], (register,), value)

    def _update(self, k: Any) -> None:
        m, n = self.m, self.n
        loops = (
            *(("n_vector", "unroll", n.each // n.vector), ("m_vector", "unroll", m.each // m.vector)),
            *(("n_lane", "unroll", n.vector), ("m_lane", "unroll", m.vector)),
        )
        with self.ir.loops(*loops) as (n_vector, m_vector, n_lane, m_lane):
            axes = (
                ("S", n.each, n_vector * n.vector + n_lane),
                ("S", m.each, m_vector * m.vector + m_lane),
                ("R", self.size, k),
            )
            with self.ir.block("C_update", *axes) as (j, i, _):
                product = self.local["A"][i] * self.local["B"][j]
                self.ir.store(self.sums, (j, i), self.sums[j, i] + product)

    def _write_back(self, bx: Any, by: Any, tx: Any, ty: Any) -> None:
        m, n, c = self.m, self.n, self.matrix["C"]
        loops = (
            *(("n_vector", "unroll", n.each // n.vector), ("n_lane", "unroll", n.vector)),
            *(("m_vector", "unroll", m.each // m.vector), ("m_lane", "vectorized", m.vector)),
        )
        with self.ir.loops(*loops) as (n_vector, n_lane, m_vector, m_lane):
            axes = (
                ("S", self.size, by * n.tile + n.element(n_vector, n_lane, ty, n.threads)),
                ("S", self.size, bx * m.tile + m.element(m_vector, m_lane, tx, m.threads)),
                ("S", n.each, n_vector * n.vector + n_lane),
                ("S", m.each, m_vector * m.vector + m_lane),
            )
            with self.ir.block("C_store", *axes) as (row, column, j, i):
                value = self.alpha * self.sums[j, i] + self.beta * c[row, column]
                self.ir.store(c, (row, column), value)


KERNEL = TunedKernel(
    name=f"xgemm:m={SIZE},n={SIZE},k={SIZE}",
    parameters=PARAMETERS,
    build=build,
    inexpressible=inexpressible,
    canonical=canonical,
)
