"""Replacement of the model without a failed request: load, test, swap.

``SIGHUP`` to the service, or ``POST /models/reload`` by an administrator, loads the configured folder
again. A model that cannot be loaded or fails the golden prediction is refused, and the old model stays.
"""
