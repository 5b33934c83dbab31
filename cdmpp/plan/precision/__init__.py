"""Precision of each operator on unlike devices that train together, after QSync (IPDPS '24)."""
