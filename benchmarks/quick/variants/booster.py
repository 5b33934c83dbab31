"""XGBoost on the network's inputs, the baseline of ``docs/accuracy.md``, with the sample's rows."""

from benchmarks.quick.variant import Fitted, QuickSample, QuickVariant
from cdmpp.model.nn.batch import NetworkInputs
from cdmpp.train.baselines import TreeBaseline


class QuickBooster(QuickVariant):
    """Trees in place of the network."""

    def fit(self, sample: QuickSample, seed: int) -> Fitted:
        config = self.config(seed)
        trees = TreeBaseline(sample.dataset, NetworkInputs(sample.dataset.store, sample.dataset.device_matrix), config)
        return Fitted(log_s=trees.fit(sample.training).predict_log)


VARIANT = QuickBooster()
