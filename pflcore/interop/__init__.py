"""pflcore in other people's code: their models as rows, one call, and a server and a client without
a simulation."""

from pflcore.interop.halves import Client, Server
from pflcore.interop.mixing import Clusters, Krum, personalize
from pflcore.interop.packing import pack, unpack

__all__ = [
    "Client",
    "Clusters",
    "Krum",
    "Server",
    "pack",
    "personalize",
    "unpack",
]
