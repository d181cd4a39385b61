"""The records of a logger.

pytest's own plugin for logs is off: it visits every logger of every library around each
test, which is a thirtieth of the suite.
"""

import logging
from contextlib import contextmanager


class _Collector(logging.Handler):
    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record)


@contextmanager
def logged(name, level=logging.WARNING):
    """A list of the records of a logger, from a level on, while the block runs."""
    logger = logging.getLogger(name)
    collector = _Collector()
    before = logger.level
    logger.addHandler(collector)
    logger.setLevel(level)
    try:
        yield collector.records
    finally:
        logger.setLevel(before)
        logger.removeHandler(collector)
