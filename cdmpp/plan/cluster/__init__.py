"""Workers for elastic training jobs on a cluster that also borrows inference servers (Aryl)."""

from cdmpp.plan.cluster.solver import ClusterJob, allocate, equal_share, greedy, least, most_saved, reclaim

__all__ = ["ClusterJob", "allocate", "equal_share", "greedy", "least", "most_saved", "reclaim"]
