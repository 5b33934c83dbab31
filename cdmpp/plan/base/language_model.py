"""Language models as curves: seconds of a step, or of half a layer, by batch size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from cdmpp.errors import FieldError
from cdmpp.predict.llm.estimate import DEFAULT_FRAMEWORK, MAX_BATCH, MAX_TOKENS
from cdmpp.predict.llm.layout import MAX_DEGREE, Layout, Types
from cdmpp.predict.llm.memory import part_memory
from cdmpp.predict.llm.operators import Decode, Prefill, step_operators
from cdmpp.predict.llm.pricing import PricedStep, StepPricing
from cdmpp.predict.llm.read import read_config
from cdmpp.predict.prediction import Prediction
from cdmpp.predict.requests.fields import Closed, Count, DeviceForm, PriceRequest, WholeNumber
from cdmpp.programs.query_options import ProgramFramework

#: Batch sizes of a curve that names none, and most batch sizes of a curve.
DEFAULT_BATCHES = tuple(2**i for i in range(9))
MAX_BATCHES = 256

Degree = Annotated[int, Field(ge=1, le=MAX_DEGREE), WholeNumber]


class LanguageModelForm(Closed):
    """A language model whose steps are predicted (docs/llm.md); ``batch`` of the curve counts sequences."""

    config: Annotated[
        dict[str, Any],
        Field(
            min_length=1,
            max_length=1000,
            description="The content of a config.json of Hugging Face. In Python and on the command line also a path.",
        ),
    ]
    phase: Annotated[
        Literal["decode", "prefill"],
        Field(description="A step that adds a token to each sequence, or one over prompts."),
    ] = "decode"
    part: Annotated[
        Literal["step", "attention", "ffn"],
        Field(description="The whole step, or the mean over the layers of their attention or feed-forward half."),
    ] = "step"
    past_len: Annotated[
        int, Field(ge=0, le=MAX_TOKENS, description="decode: cached tokens of each sequence."), WholeNumber
    ] = 1024
    input: Annotated[int, Field(ge=1, le=MAX_TOKENS, description="prefill: tokens of each prompt."), WholeNumber] = 1024
    tp: Annotated[Degree, Field(description="Ranks that share each layer.")] = 1
    pp: Annotated[Degree, Field(description="Stages that share the layers.")] = 1
    ep: Annotated[Degree, Field(description="Groups that share the experts.")] = 1
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    weights: Annotated[
        Literal["float8_e4m3", "int8", "float4_e2m1", "int4", "bfloat16", "float16", "float32"] | None,
        Field(description="Type of quantised weights; null: as the configuration says, else `dtype`."),
    ] = None
    cuda_graph: Annotated[bool, Field(description="Decode steps are captured graphs.")] = True
    device: Annotated[DeviceForm | None, Field(description="In place of the curve's `device`.")] = None
    framework: Annotated[
        ProgramFramework | None, Field(description=f"In place of the curve's `framework`; null: {DEFAULT_FRAMEWORK}.")
    ] = None

    def steps(self, batches: Sequence[Count], path: str) -> list[StepPricing]:
        """The step of each batch size.

        Raises
        ------
        FieldError
            The configuration or the layout is wrong; ``path`` is the place of this form in the request.
        """
        if len(batches) > MAX_BATCHES or max(batches) > MAX_BATCH:
            raise FieldError(
                f"{path}: a language model has at most {MAX_BATCHES} batch sizes of at most {MAX_BATCH} sequences",
                path=path,
                hint="give fewer or smaller sizes in batch",
            )
        try:
            config, layout = read_config(self.config), self.layout
            only = None if self.part == "step" else self.part
            return [
                StepPricing(
                    step_operators(
                        config,
                        layout,
                        Decode(batch, self.past_len) if self.phase == "decode" else Prefill([self.input] * batch),
                        dtype=self.dtype,
                        weights=self.weights,
                        only=only,
                    ),
                    self.cuda_graph and self.phase == "decode",
                )
                for batch in batches
            ]
        except FieldError as error:
            where = f"{path}.{error.path}"
            raise FieldError(f"{path}.{error.message}", path=where, hint=error.hint) from None

    @property
    def layout(self) -> Layout:
        """Degrees of parallelism."""
        return Layout(self.tp, self.pp, self.ep)

    def memory(self, tokens: int | None = None) -> tuple[float, float]:
        """Bytes on each device of one instance: weights, and cache of one sequence in each replica.

        Parameters
        ----------
        tokens : int, optional
            Tokens of the sequence; default: those of the step.
        """
        config = read_config(self.config)
        if tokens is None:
            tokens = self.past_len + 1 if self.phase == "decode" else self.input
        only = None if self.part == "step" else self.part
        return part_memory(config, self.layout, Types.of(config, self.dtype, self.weights), only, tokens)

    def price_requests(
        self, batches: Sequence[Count], path: str, device: DeviceForm, framework: str | None
    ) -> list[PriceRequest]:
        """Programs of all steps, those of the first batch size first."""
        return [
            PriceRequest(
                path,
                program.canonical(),
                device,
                protocol=protocol,
                framework=framework or DEFAULT_FRAMEWORK,  # type: ignore[arg-type]
            )
            for step in self.steps(batches, path)
            for program, protocol in step.programs
        ]

    def priced(self, batches: Sequence[Count], prices: Iterator[Prediction]) -> list[tuple[PricedStep, float]]:
        """Steps with their latencies, and what their seconds are divided by: layers, for a part of a layer."""
        divisor = 1.0 if self.part == "step" else float(read_config(self.config).layers)
        return [(step.priced([next(prices) for _ in step.programs]), divisor) for step in self.steps(batches, "llm")]
