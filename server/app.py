"""``server.app``: the former name of ``cdmpp_server.app``, for checkouts of this release only."""

import warnings

from cdmpp_server.app import create_app as create_app

warnings.warn("server.app:create_app is deprecated: use cdmpp_server.app:create_app", DeprecationWarning, stacklevel=2)
