"""Memory of AFD instances: weights of all layers, and the caches of the sequences on an instance."""

from __future__ import annotations

from cdmpp.plan.afd.schema import SideForm
from cdmpp.predict.requests.memory import check_fits, memory_limit
from cdmpp.programs.operators import make_operator, resident_bytes


def side_bytes(form: SideForm, path: str, layers: int) -> tuple[float, float]:
    """Bytes on one device of an instance: weights, and cache of one sequence, in all layers."""
    weights, cache = 0.0, 0.0
    if form.layer.llm is not None:
        weights, cache = form.layer.llm.memory()
        cache /= form.layer.llm.layout.replicas
    elif form.layer.works is not None:
        works, largest = form.layer.works, form.layer.batch[-1]
        for work, request in zip(works, form.layer.price_requests(path)[-len(works) :], strict=True):
            fixed, held = resident_bytes(make_operator(request.program))
            weights += layers * work.count * fixed
            cache += layers * work.count * held / largest
    return (
        weights if form.weight_bytes is None else form.weight_bytes,
        cache if form.bytes_per_token is None else form.bytes_per_token,
    )


def tokens_in_memory(forms: dict[str, SideForm], layers: int, in_flight: int, ignore: bool) -> int | None:
    """Tokens of a micro-batch that an instance which computes all these sides holds; None: memory is no limit.

    Parameters
    ----------
    forms : dict of str to SideForm
        Sides by their field in the request.
    in_flight : int
        Micro-batches whose sequences have their caches on the instance at the same time.

    Raises
    ------
    InfeasibleError
        The weights and one sequence of each micro-batch do not fit.
    """
    limit = min(memory_limit(form.memory_bytes, [form.layer.device], ignore) for form in forms.values())
    parts = [side_bytes(form, f"{path}.layer", layers) for path, form in forms.items()]
    weights, cache = sum(part[0] for part in parts), in_flight * sum(part[1] for part in parts)
    path = next(iter(forms))
    check_fits(
        f"one device of an instance ({' and '.join(forms)}) with one sequence in each of {in_flight} micro-batches",
        weights + cache,
        limit,
        path=path,
        fits="use devices with more memory, more devices in an instance (tp, ep), or smaller weights",
    )
    return int((limit - weights) // cache) if cache and limit < float("inf") else None
