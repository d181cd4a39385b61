"""Tests of Ctrl-C at any time.

Each finished round is in the record, and the run continues from there.
"""

import signal

from pflcore.simulation._signals import allow_signals, defer_signals


def test_signals_of_a_program_that_answers_them_itself_reach_it():
    came = []
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        with defer_signals():
            signal.raise_signal(signal.SIGTERM)
            assert not came
        assert came == [signal.SIGTERM]
        with defer_signals():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            assert came == [signal.SIGTERM] * 2, "the second does not wait"
        assert came == [signal.SIGTERM] * 2
    finally:
        signal.signal(signal.SIGTERM, before)


def test_signals_come_at_once_in_an_allowed_part_alone():
    came = []

    def handler(number, _):
        came.append(number)

    before = signal.signal(signal.SIGTERM, handler)
    try:
        with defer_signals():
            with allow_signals():
                signal.raise_signal(signal.SIGTERM)
                assert len(came) == 1
                with defer_signals():
                    signal.raise_signal(signal.SIGTERM)
                assert len(came) == 1, "the block within the part holds it back"
            with allow_signals():
                assert len(came) == 1, "one that waits goes on waiting"
        assert len(came) == 2
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)
