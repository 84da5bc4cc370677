import os
import signal

import pytest

from headstart.heads.errors import Terminated
from headstart.sigterm import terminable
from headstart.train.launching.signals import StopSignal


def test_second_interrupt_interrupts_and_handlers_come_back():
    before = signal.getsignal(signal.SIGINT)
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.received == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            signal.pause()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_signal_after_the_end_can_be_left_ignored():
    before = signal.getsignal(signal.SIGTERM)
    try:
        with terminable():
            pass
        assert signal.getsignal(signal.SIGTERM) is before
        with terminable(signal.SIG_IGN):
            with pytest.raises(Terminated):
                os.kill(os.getpid(), signal.SIGTERM)
                signal.pause()
        os.kill(os.getpid(), signal.SIGTERM)  # would end this process
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
