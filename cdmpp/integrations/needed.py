"""TVM's parts that an integration uses, or an error that says how to get them."""

from __future__ import annotations

from cdmpp.errors import MissingDependencyError

try:
    import tvm
    import tvm_ffi
    from tvm.ir.utils import derived_object
    from tvm.s_tir import meta_schedule as ms
except ImportError as error:
    raise MissingDependencyError(
        "TVM's search needs TVM",
        hint="pip install '.[predict,measure]' in a checkout of cdmpp (pins apache-tvm and apache-tvm-ffi)",
    ) from error

__all__ = ["derived_object", "ms", "tvm", "tvm_ffi"]
