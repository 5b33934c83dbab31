"""Work of a kernel that the program in its place does not have: arithmetic, few thread blocks, dependent steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KernelWork:
    """Bounds of a kernel besides those of its program. :func:`cdmpp.predict.modules.work.seconds_of` applies them."""

    kind: str  # for people: "one block a row"
    operations: float = 0.0  # instructions of all threads; those that multiply and add count as two
    cycles: float = 0.0  # clock cycles of one thread block, or of the longest chain of dependent instructions
    blocks: float = 1.0  # thread blocks with so many cycles each
    resident: float = 1.0  # blocks that one unit runs at the same time without slowing down
    steps: float = 1.0  # how often the program runs, one after another
    step_share: float = 1.0  # share of the program's latency that each step after the first takes
    replaces: bool = False  # the program's latency does not count: it only names the kernel


@dataclass(frozen=True)
class ConvolutionWork:
    """A convolution by its arithmetic, with the changes of layout that tensor cores need."""

    dtype: str
    places: float  # positions of the result of all images
    # Channels of a group.
    c_in: int
    c_out: int
    taps: float  # elements of the filter
    groups: int
    # Input and result.
    x_bytes: float
    y_bytes: float
    layout_bytes: float  # those of them that are channels-first: tensor cores need them channels-last
    bias: bool  # a pass over the result of its own
    plain: bool  # two axes or fewer and not transposed: public tables have such convolutions
    axes: int = 2  # of an image
    # Of a transposed convolution: positions of the result for each of the input. One of ``strides`` elements of the
    # filter reaches a position.
    strides: float = 1.0

    @property
    def kind(self) -> str:
        """For people."""
        return "a convolution by its arithmetic and layouts"


@dataclass(frozen=True)
class AttentionWork:
    """Fused attention in 16 bit with heads of up to 256, as PyTorch's FlashAttention computes it."""

    heads: int  # of all sequences
    # Tokens of a sequence.
    queries: int
    keys: int
    head_dim: int
    causal: bool

    @property
    def kind(self) -> str:
        """For people."""
        return "FlashAttention by its tiles"


Work = KernelWork | ConvolutionWork | AttentionWork
