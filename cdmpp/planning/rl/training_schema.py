"""Parts of the RL request: cost of training, and transfer of the weights."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import ConfigDict, Field, model_validator

from cdmpp.compose.pricing import PredictedCost
from cdmpp.compose.request import Closed, Count, Interval, PositiveBytes, PositiveSeconds, Seconds, exactly_one
from cdmpp.errors import FieldError
from cdmpp.planning.fused.schema import FusedRequest
from cdmpp.planning.rl.weights import SiteLink, WeightTransfer

Site = Annotated[str, Field(max_length=200)]


def within(error: FieldError, path: str) -> FieldError:
    """The error of a nested request, with the path of its field in the outer request."""
    path = f"{path}.{error.path}".rstrip(".")
    return type(error)(f"{path}: {error.message.removeprefix(error.path + ': ')}", hint=error.hint, path=path)


class PipelineAnswer(Closed):
    """The answer of ``cdmpp plan pipeline``. Fields that are not listed here are ignored."""

    model_config = ConfigDict(extra="ignore")

    makespan_s: PositiveSeconds
    interval: Annotated[Interval | None, Field(description="With all predictions at their bounds.")] = None


class PipelineForm(Closed):
    """Training by a pipeline schedule, such as RLHFuse's fused pipelines of actor and critic.

    Each run of the schedule trains on ``samples`` samples. The samples of a step, or of a streamed batch, are divided
    between the pipelines; each runs its schedule as often as it takes. Either ``request`` or ``answer``.
    """

    request: Annotated[
        FusedRequest | None,
        Field(description="The schedule is searched, within its own budget_s and at most a quarter of this request's."),
    ] = None
    answer: PipelineAnswer | None = None
    samples: Annotated[Count, Field(description="Samples of one run: those of all its micro-batches.")]
    units: Annotated[
        Count, Field(description="Units of the pool that one pipeline occupies: its ranks, if a unit is one device.")
    ] = 1

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        return exactly_one(self, "request", "answer")


class TrainingForm(Closed):
    """Cost of training on one unit; the given costs are added. At least one of the first five."""

    step_s: Annotated[PositiveSeconds | None, Field(description="For all samples of a step.")] = None
    seconds_per_sample: PositiveSeconds | None = None
    seconds_per_token: Annotated[
        PositiveSeconds | None, Field(description="For each token of prompt and response.")
    ] = None
    sample: Annotated[PredictedCost | None, Field(description="Predicted, for each sample.")] = None
    pipeline: Annotated[PipelineForm | None, Field(description="Training by a pipeline schedule.")] = None
    fixed_s: Annotated[Seconds, Field(description="Once per step, for any number of units: optimizer.")] = 0.0
    efficiency: Annotated[
        float, Field(gt=0.5, le=1, description="Share of the ideal speed-up that remains at each doubling of units.")
    ] = 1.0
    batch_overhead_s: Annotated[Seconds, Field(description="Added for each batch of a streamed step.")] = 0.0

    @model_validator(mode="after")
    def _some(self) -> Self:
        given = (self.step_s, self.seconds_per_sample, self.seconds_per_token, self.sample, self.pipeline)
        if all(cost is None for cost in given):
            raise ValueError("give step_s, seconds_per_sample, seconds_per_token, sample or pipeline")
        return self


class LinkForm(Closed):
    """A link within a site or between sites."""

    bandwidth_bytes_per_s: Annotated[PositiveBytes, Field(description="Of one connection.")]
    latency_s: Seconds = 0.0
    total_bytes_per_s: Annotated[
        PositiveBytes | None, Field(description="Of all connections together; null: not limited.")
    ] = None

    def link(self) -> SiteLink:
        """The link of the search."""
        total = float("inf") if self.total_bytes_per_s is None else self.total_bytes_per_s
        return SiteLink(self.bandwidth_bytes_per_s, self.latency_s, total)


class SitesForm(LinkForm):
    """A link between two sites, in both directions."""

    sites: Annotated[list[Site], Field(min_length=2, max_length=2)]


class TransferForm(Closed):
    """Bytes of the weights, and the links of the transfer."""

    bytes: Annotated[PositiveBytes, Field(description="One copy of the weights, as generation needs them.")]
    ranks: Annotated[Count, Field(description="Connections in parallel; each sends an equal part.")] = 1
    same_site: Annotated[
        LinkForm | None, Field(description="Within a site; also distributes a copy that came from another site.")
    ] = None
    cross_site: Annotated[LinkForm | None, Field(description="Between sites without a link in `links`.")] = None
    links: Annotated[list[SitesForm], Field(description="Links between two sites.")] = Field(default_factory=list)

    def transfer(self) -> WeightTransfer:
        """The transfer of the search."""
        return WeightTransfer(
            self.bytes,
            self.ranks,
            None if self.same_site is None else self.same_site.link(),
            None if self.cross_site is None else self.cross_site.link(),
            {frozenset(form.sites): form.link() for form in self.links},
        )


class WeightsForm(Closed):
    """Transfer of the new weights from training to generation: given in seconds, or computed from ``transfer``."""

    same_site_s: Seconds = 0.0
    cross_site_s: Seconds = 0.0
    shared_s: Annotated[Seconds, Field(description="If the same units generate and train.")] = 0.0
    transfer: Annotated[TransferForm | None, Field(description="Replaces same_site_s and cross_site_s.")] = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.transfer is not None and (self.same_site_s or self.cross_site_s):
            raise ValueError("give either transfer, or same_site_s and cross_site_s")
        return self

    def check(self, training: dict[str, str], generation: dict[str, str]) -> None:
        """Raise FieldError if two sites that exchange weights have no link.

        Parameters
        ----------
        training, generation : dict of str to str
            Site of each pool that trains, and of each that generates, by name.
        """
        if self.transfer is None:
            return
        transfer = self.transfer.transfer()
        for index, form in enumerate(self.transfer.links):
            if form.sites[0] == form.sites[1]:
                raise FieldError(
                    f"weights.transfer.links.{index}.sites: both are {form.sites[0]!r}",
                    path=f"weights.transfer.links.{index}.sites",
                    hint="a link within a site is same_site",
                )
        for trainer, source in training.items():
            for generator, target in generation.items():
                if transfer.link(source, target) is None or transfer.same_site is None:
                    inside = source == target or transfer.link(source, target) is not None
                    raise FieldError(
                        f"weights.transfer: no link {'within' if inside else 'from ' + repr(source) + ' to'} site "
                        f"{target!r}, for weights from pool {trainer!r} to pool {generator!r}",
                        path="weights.transfer",
                        hint='give "same_site"' if inside else 'give "cross_site", or both sites in "links"',
                    )
