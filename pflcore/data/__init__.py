"""Federated data: the samples of clients, and the rules that cut a pool among them.

Data that are known by a name or come in files of their own are in `pflcore.lab.data`.
"""

from pflcore.data._federation import Federation
from pflcore.data._inputs import pad_sequences
from pflcore.data._partition import PARTITIONS as PARTITIONS
from pflcore.data._partition import partition

__all__ = ["Federation", "pad_sequences", "partition"]
