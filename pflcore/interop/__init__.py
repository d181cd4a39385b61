"""pflcore in other people's code: their models as rows, one call, and a server and a client without
a simulation."""

from pflcore.interop.mixing import personalize
from pflcore.interop.packing import pack, unpack
from pflcore.interop.remote import Client, Server

__all__ = [
    "Client",
    "Server",
    "pack",
    "personalize",
    "unpack",
]
