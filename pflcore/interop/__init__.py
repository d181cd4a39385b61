"""pflcore in other code: models as rows, a server and a client.

None of it needs a simulation.
"""

from pflcore.interop._client import Client
from pflcore.interop._packing import pack, unpack
from pflcore.interop._personalize import personalize
from pflcore.interop._server import Server

__all__ = [
    "Client",
    "Server",
    "pack",
    "personalize",
    "unpack",
]
