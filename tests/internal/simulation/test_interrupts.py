"""Tests of Ctrl-C at any time.

Each finished round is in the record, and the run continues from there.
"""

import signal

from pflcore.simulation._signals import defer_signals


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
