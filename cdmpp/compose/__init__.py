"""What replay, the emulator and the planners share: requests with costs to predict, budgets, answers.

The way of every question above single programs: a :class:`Request` (JSON, checked) names programs; a
predictor prices them; the request makes its answer from the prices under a :class:`Watch`.
"""

from cdmpp.compose.request import Answer, Asked, Explained, Request
from cdmpp.compose.watch import Progress, Watch

__all__ = ["Answer", "Asked", "Explained", "Progress", "Request", "Watch"]
