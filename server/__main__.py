"""``python -m server``: the former name of ``python -m cdmpp_server``, for checkouts of this release only."""

import sys
import warnings

from cdmpp_server.__main__ import main

warnings.warn("`python -m server` is deprecated: use `python -m cdmpp_server`", DeprecationWarning, stacklevel=1)
if __name__ == "__main__":
    sys.exit(main())
