"""Imports of TVM for the integrations; the error has installation instructions."""

from __future__ import annotations

from cdmpp.errors import MissingDependencyError, install_hint

try:
    import tvm
    import tvm_ffi
    from tvm.ir.utils import derived_object
    from tvm.s_tir import meta_schedule as ms
except ImportError as error:
    raise MissingDependencyError("TVM is not installed", hint=install_hint("predict,measure")) from error

__all__ = ["derived_object", "ms", "tvm", "tvm_ffi"]
