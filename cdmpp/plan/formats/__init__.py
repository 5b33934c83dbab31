"""Plans as the files of other frameworks, and such files as plan requests.

>>> from cdmpp.plan.formats import export_plan, import_request
>>> request = import_request("megatron", text, "split", device="h100-sxm").request  # doctest: +SKIP
>>> plan = cdmpp.make_plan("split", request, predictor)  # doctest: +SKIP
>>> export_plan("megatron-layout", "split", request, plan).text  # doctest: +SKIP

docs/exports.md describes the formats.
"""

from cdmpp.plan.formats.registry import FORMATS, Exported, Imported, export_plan, import_request, write_export

__all__ = ["FORMATS", "Exported", "Imported", "export_plan", "import_request", "write_export"]
