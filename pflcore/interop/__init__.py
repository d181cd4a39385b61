"""pflcore in other people's code: their models as rows, one call, and a server and a client without
a simulation."""

from pflcore.interop.client import Client
from pflcore.interop.mixing import Clusters, Krum, personalize
from pflcore.interop.packing import pack, unpack
from pflcore.interop.server import Server

__all__ = [
    "Client",
    "Clusters",
    "Krum",
    "Server",
    "pack",
    "personalize",
    "unpack",
]
