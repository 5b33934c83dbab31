"""A new model without a failed request: loaded aside, tried, and put in the place of the old one.

``SIGHUP`` to the service, or ``POST /models/reload`` by an administrator, loads the configured folder
again. A model that cannot be loaded or fails the golden prediction is refused, and the old one goes on.
"""
