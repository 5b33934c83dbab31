"""Workers for elastic training jobs on a cluster that also borrows inference servers (Aryl)."""

from cdmpp.plan.cluster.allocate import Job, allocate, equal_share, greedy, least, most_saved
from cdmpp.plan.cluster.reclaim import Reclaimed, reclaim

__all__ = ["Job", "Reclaimed", "allocate", "equal_share", "greedy", "least", "most_saved", "reclaim"]
