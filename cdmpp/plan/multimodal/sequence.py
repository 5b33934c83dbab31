"""Orders of segments: compiled completion of a partial order, and the orders that a search starts from."""

from __future__ import annotations

import numpy as np

from cdmpp.plan.multimodal.tasks import Tasks
from cdmpp.utils.jit import jit

_EMPTY = np.empty(0, np.int64)


@jit
def complete(
    prefix: np.ndarray,
    first_segment: np.ndarray,
    need_ptr: np.ndarray,
    need_class: np.ndarray,
    need_count: np.ndarray,
    key: np.ndarray,
    sequence: np.ndarray,
) -> None:
    """Complete an order of segments: always the allowed class whose next segment has the least key.

    Parameters
    ----------
    prefix : ndarray of int64, shape (fixed places,)
        Class (segment of a module) of each of the first places.
    first_segment : ndarray of int64, shape (classes + 1,)
        Segments of a class, one for each sub-micro-batch, in order.
    need_ptr, need_class, need_count : ndarray of int64
        Segment s is allowed once class ``need_class[i]`` has occurred ``need_count[i]`` times, for i from
        ``need_ptr[s]`` to ``need_ptr[s + 1]``.
    key : ndarray of float64, shape (segments,)
    sequence : ndarray of int64, shape (segments,)
        Filled with the segments in order.
    """
    classes = len(first_segment) - 1
    done = np.zeros(classes, np.int64)
    for place in range(len(sequence)):
        chosen = -1
        if place < len(prefix):
            chosen = prefix[place]
        else:
            least = np.inf
            for c in range(classes):
                segment = first_segment[c] + done[c]
                if segment >= first_segment[c + 1] or key[segment] >= least:
                    continue
                allowed = True
                for i in range(need_ptr[segment], need_ptr[segment + 1]):
                    if done[need_class[i]] < need_count[i]:
                        allowed = False
                        break
                if allowed:
                    least = key[segment]
                    chosen = c
        sequence[place] = first_segment[chosen] + done[chosen]
        done[chosen] += 1


def sequence_by(tasks: Tasks, key: np.ndarray, prefix: np.ndarray = _EMPTY) -> np.ndarray:
    """Segments by growing ``key``, each after those that it depends on.

    Parameters
    ----------
    key : ndarray of float64, shape (segments,)
    prefix : ndarray of int64, shape (fixed places,)
        Class of each of the first places.

    Returns
    -------
    ndarray of int64, shape (segments,)
    """
    sequence = np.empty(tasks.segments, np.int64)
    complete(prefix, tasks.first_segment, tasks.need_ptr, tasks.need_class, tasks.need_count, key, sequence)
    return sequence


def data_order_key(tasks: Tasks) -> np.ndarray:
    """Key that orders segments by their share of the step's items: related segments of all modules come together.

    Returns
    -------
    ndarray of float64, shape (segments,)
    """
    key = np.empty(tasks.segments)
    for c, (i, _) in enumerate(tasks.classes):
        before = np.concatenate([[0], np.cumsum(tasks.items[i])[:-1]])
        key[tasks.first_segment[c] : tasks.first_segment[c + 1]] = before / sum(tasks.items[i])
    # Classes are in topological order: ties go to the earlier module.
    return key + 1e-9 * np.repeat(np.arange(len(tasks.classes)), np.diff(tasks.first_segment))


def initial_keys(tasks: Tasks) -> list[np.ndarray]:
    """Keys that a search starts from: by share of the step, by module, by class; each of shape (segments,)."""
    by_share = data_order_key(tasks)
    modules = np.repeat([i for i, _ in tasks.classes], np.diff(tasks.first_segment))
    place = {i: at for at, i in enumerate(dict.fromkeys(i for i, _ in tasks.classes))}
    by_module = np.array([place[int(i)] for i in modules], dtype=np.float64)
    by_class = np.repeat(np.arange(len(tasks.classes)), np.diff(tasks.first_segment)).astype(np.float64)
    return [by_share, by_share + by_module, by_share + by_class]


def allowed_classes(tasks: Tasks, prefix: list[int]) -> list[int]:
    """Classes that may follow a beginning of an order, given as the class of each place."""
    done = [0] * len(tasks.classes)
    for c in prefix:
        done[c] += 1
    allowed = []
    for c in range(len(done)):
        segment = int(tasks.first_segment[c]) + done[c]
        if segment < tasks.first_segment[c + 1] and all(
            done[tasks.need_class[i]] >= tasks.need_count[i]
            for i in range(int(tasks.need_ptr[segment]), int(tasks.need_ptr[segment + 1]))
        ):
            allowed.append(c)
    return allowed
