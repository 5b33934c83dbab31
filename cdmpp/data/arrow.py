"""pyarrow, or a clear error where it is not installed (it comes with the extra ``train``)."""

from __future__ import annotations

from cdmpp.errors import MissingDependencyError, install_hint

try:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.csv as pa_csv
    import pyarrow.parquet as pq
except ImportError:  # pragma: no cover - the tests have it
    raise MissingDependencyError("reading measurement tables needs pyarrow", hint=install_hint("train")) from None

__all__ = ["pa", "pa_csv", "pc", "pq"]
