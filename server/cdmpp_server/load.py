"""Admission of requests to a few processes, by the time that they are predicted to take.

Senders get equal shares of the processes. A request is admitted if it would be finished in time in that order;
otherwise it is refused at once, because work on a request that misses its deadline is lost.
"""

from __future__ import annotations

from dataclasses import dataclass

from cdmpp.utils.lru import Lru
from cdmpp_server.predict.admission import RefusedError

#: Seconds of a request until one of its kind is measured.
FIRST_S = 0.02
#: A request has to be finished within this share of its time. The rest is for requests of other senders, which may
#: delay it, and for errors of the prediction.
SHARE = 0.5
#: Weight of the latest request in the mean of its kind.
_WEIGHT = 0.3
#: Kinds and senders whose mean is kept.
_MAX_MEANS = 10_000


@dataclass(eq=False)
class Place:
    """An admitted request."""

    sender: str
    kind: str
    #: Size in any unit of the kind.
    size: float = 1.0
    #: Seconds of processes so far.
    used_s: float = 0.0
    #: Seconds that were charged to the sender when the first job was queued.
    charged_s: float = 0.0


class ExpectedWork:
    """Admitted requests and their predicted work. Uses no clock."""

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._means: Lru[float] = Lru(_MAX_MEANS)
        self._open: set[Place] = set()

    def admit(self, sender: str, kind: str, size: float, left_s: float) -> Place:
        """Add a request that has ``left_s`` seconds; one that finds a free process is always admitted.

        Raises RefusedError: the request would probably miss its deadline.
        """
        place = Place(sender, kind, size)
        if len(self._open) >= self._processes:
            work: dict[str, float] = {}
            for other in self._open:
                work[other.sender] = work.get(other.sender, 0.0) + self.seconds(other)
            of_sender = work.pop(sender, 0.0) + self.seconds(place)
            finish_s = (of_sender + sum(min(other, of_sender) for other in work.values())) / self._processes
            if finish_s > SHARE * left_s:
                raise RefusedError(finish_s - SHARE * left_s)
        self._open.add(place)
        return place

    def seconds(self, place: Place) -> float:
        """Predicted seconds of processes that a request still takes."""
        mean = self._means.get((place.kind, place.sender)) or self._means.get(place.kind) or FIRST_S
        return max(0.0, mean * place.size - place.used_s)

    def end(self, place: Place, done: bool) -> None:
        """Remove a request; the time of one that was ``done`` predicts that of later ones."""
        if done or self.seconds(place) == 0:
            for key in ((place.kind, place.sender), place.kind):
                latest, mean = place.used_s / place.size, self._means.get(key)
                self._means.put(key, latest if mean is None else mean + _WEIGHT * (latest - mean), 1)
        self._open.discard(place)
