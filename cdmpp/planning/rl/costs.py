"""What the stages of a step cost: the decode curve, training, pools of units and their prices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cdmpp.compose.pricing import interpolate
from cdmpp.curves.isotonic import monotone_fit
from cdmpp.errors import FieldError
from cdmpp.planning.rl.generation import Engine, Floats


def token_table(sizes: Floats, seconds: Floats, batch: int) -> Floats:
    """``PTL(batch)`` at 0 (unused), 1, ..., ``batch``.

    Parameters
    ----------
    sizes, seconds : float64 arrays
        Points of the curve, sizes growing. Seconds that fall are fitted (a larger batch is not faster, the
        difference is an error), as ``/curve`` does.
    batch : int

    Notes
    -----
    Lines between the points; below the first its seconds stand, and beyond the last they grow in proportion.
    """
    logs = np.log(np.maximum(seconds, 1e-15))
    fitted = monotone_fit(logs, [0])
    smooth = np.where(fitted == logs, np.maximum(seconds, 1e-15), np.exp(fitted))
    table: Floats = np.asarray(interpolate(sizes, smooth, np.arange(batch + 1)), dtype=np.float64)
    return table


@dataclass(frozen=True)
class TrainingCost:
    """Seconds of training on a step's samples.

    Attributes
    ----------
    per_sample_s, per_token_s : float
        On one unit, for each sample and for each token of prompt and response.
    fixed_s : float
        Once in a step, however many units: optimizer, synchronisation.
    efficiency : float
        Share of the ideal speed-up that a doubling of the units leaves, in (0.5, 1].
    batch_overhead_s : float
        What each batch of a streamed step adds.
    inference_s : float
        Of each sample, where training's units run the rewards, references and critics; it scales ideally.
    """

    per_sample_s: float = 0.0
    per_token_s: float = 0.0
    fixed_s: float = 0.0
    efficiency: float = 1.0
    batch_overhead_s: float = 0.0
    inference_s: float = 0.0

    def speedup(self, units: Floats | float) -> Floats:
        """Of so many units over one."""
        many = np.asarray(units, dtype=np.float64)
        speed: Floats = many * self.efficiency ** np.log2(many)
        return speed

    def work_s(self, samples: Floats | float, tokens: Floats | float, units: Floats | float) -> Floats:
        """Seconds of so many samples and tokens, without what is added once."""
        each = self.per_sample_s * samples + self.per_token_s * np.asarray(tokens)
        many = np.asarray(units, dtype=np.float64)
        work: Floats = each / self.speedup(many) + self.inference_s * samples / many
        return work

    def whole_s(self, samples: Floats | float, tokens: Floats | float, units: Floats | float) -> Floats:
        """Seconds of a step's training in one batch."""
        whole: Floats = self.work_s(samples, tokens, units) + self.batch_overhead_s + self.fixed_s
        return whole


@dataclass(frozen=True)
class Pool:
    """Equal units at one site.

    Attributes
    ----------
    name : str
    units : int
        How many may be used; one is an instance of generation or a data-parallel unit of training.
    price_per_hour : float
        Of one unit.
    site : str
        Between sites, weights take ``cross_site_s``.
    engine : Engine or None
        None: not for generation.
    training : TrainingCost or None
        None: not for training.
    inference_s : float
        Seconds that one unit takes for one sample's reward, reference and critic values.
    """

    name: str
    units: int
    price_per_hour: float = 0.0
    site: str = ""
    engine: Engine | None = None
    training: TrainingCost | None = None
    inference_s: float = 0.0

    def generates(self) -> Engine:
        """Its engine; raises where it has none."""
        if self.engine is None:
            raise FieldError(f"pool {self.name!r} does not generate", path="pools")
        return self.engine
