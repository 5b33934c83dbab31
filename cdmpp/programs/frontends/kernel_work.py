"""Work of a kernel that the program in its place does not have: arithmetic, few thread blocks, dependent steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KernelWork:
    """Bounds of a kernel besides those of its program. :func:`cdmpp.predict.modules.work.seconds_of` applies them.

    Attributes
    ----------
    kind : str
        For people: "one block a row".
    operations : float
        Instructions of all threads; those that multiply and add count as two.
    cycles : float
        Clock cycles of one thread block, or of the longest chain of dependent instructions.
    blocks : float
        Thread blocks with so many cycles each.
    resident : float
        Blocks that one unit runs at the same time without slowing down.
    steps : float
        How often the program runs, one after another.
    step_share : float
        Share of the program's latency that each step after the first takes.
    replaces : bool
        The program's latency does not count: it only names the kernel.
    """

    kind: str
    operations: float = 0.0
    cycles: float = 0.0
    blocks: float = 1.0
    resident: float = 1.0
    steps: float = 1.0
    step_share: float = 1.0
    replaces: bool = False


@dataclass(frozen=True)
class ConvolutionWork:
    """A convolution by its arithmetic, with the changes of layout that tensor cores need.

    Attributes
    ----------
    dtype : str
    places : float
        Positions of the result of all images.
    c_in, c_out : int
        Channels of a group.
    taps : float
        Elements of the filter.
    groups : int
    x_bytes, y_bytes : float
        Input and result.
    layout_bytes : float
        Those of them that are channels-first: tensor cores need them channels-last.
    bias : bool
        A pass over the result of its own.
    plain : bool
        Two axes or fewer and not transposed: public tables have such convolutions.
    axes : int
        Of an image.
    strides : float
        Of a transposed convolution: positions of the result for each of the input. One of ``strides`` elements of the
        filter reaches a position.
    """

    dtype: str
    places: float
    c_in: int
    c_out: int
    taps: float
    groups: int
    x_bytes: float
    y_bytes: float
    layout_bytes: float
    bias: bool
    plain: bool
    axes: int = 2
    strides: float = 1.0

    @property
    def kind(self) -> str:
        """For people."""
        return "a convolution by its arithmetic and layouts"


@dataclass(frozen=True)
class AttentionWork:
    """Fused attention in 16 bit with heads of up to 256, as PyTorch's FlashAttention computes it.

    Attributes
    ----------
    heads : int
        Of all sequences.
    queries, keys : int
        Tokens of a sequence.
    head_dim : int
    causal : bool
    """

    heads: int
    queries: int
    keys: int
    head_dim: int
    causal: bool

    @property
    def kind(self) -> str:
        """For people."""
        return "FlashAttention by its tiles"


Work = KernelWork | ConvolutionWork | AttentionWork
