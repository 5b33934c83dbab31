"""Without TVM the error says what to install."""

import subprocess
import sys

from tests.waiting import PATIENCE_S

PROGRAM = """
import sys
sys.modules["tvm"] = None
try:
    import cdmpp.integrations.metaschedule
except ImportError as error:
    print(type(error).__name__, "|", error, "|", error.hint)
"""


def test_what_to_install_without_tvm() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert done.stdout.startswith("MissingDependencyError | ") and "'.[predict,measure]'" in done.stdout
