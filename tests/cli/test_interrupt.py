"""Ctrl-C during a search."""

import signal

import pytest

from cdmpp.cli.plan import interruptible
from cdmpp.predict.requests.budget import SearchControl


def test_first_ctrl_c_ends_the_search_and_the_second_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    before, control = signal.getsignal(signal.SIGINT), SearchControl(60.0)
    with pytest.raises(KeyboardInterrupt), interruptible(control):
        assert not control.expired
        # To this thread: another one would take a signal to the process while this one waits.
        signal.raise_signal(signal.SIGINT)
        assert control.expired
        assert "best plan so far" in capsys.readouterr().err
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
