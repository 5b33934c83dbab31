"""Test double of the GPU for host parts (:mod:`tests.data.measure.stand_in_library`)."""

from tests.data.measure.stand_in_library import HostKind as Kind

__all__ = ["Kind"]
