"""Max-min fair shares of a limited number of places."""

from __future__ import annotations

from collections.abc import Mapping


def excess(held: Mapping[str, int], places: int) -> dict[str, int]:
    """Number of places that each holder gives up, so that at most ``places`` are held.

    Shares are max-min fair: a holder with no more than an equal share keeps everything, and those with more give up
    the rest. A holder of many places therefore cannot take those of a holder of few.

    Parameters
    ----------
    held : mapping of str to int
        Places by holder; among holders of equally many, the first gives up first.
    places : int
        At least 0.

    Examples
    --------
    >>> excess({"a": 2, "b": 9}, 8)
    {'b': 3}
    """
    given_up: dict[str, int] = {}
    left, holders = places, len(held)
    for holder, count in sorted(held.items(), key=lambda item: item[1]):
        share = min(count, left // holders)
        if share < count:
            given_up[holder] = count - share
        left, holders = left - share, holders - 1
    return given_up
