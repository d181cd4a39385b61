"""Personalized federated learning in Flower (Message API, flwr 1.41 and later); needs the extra
`flower`."""

from __future__ import annotations

try:
    import flwr as _  # noqa: F401
except ImportError:
    raise ImportError(
        "pflcore.interop.flower needs Flower; pip install 'pflcore[flower]'."
    ) from None

from pflcore.interop.flower.client import client_app
from pflcore.interop.flower.krum import ExactMultiKrum, select_multikrum
from pflcore.interop.flower.models import PersonalStrategy
from pflcore.interop.flower.private import keep_private
from pflcore.interop.flower.server import PflStrategy

__all__ = [
    "ExactMultiKrum",
    "PersonalStrategy",
    "PflStrategy",
    "client_app",
    "keep_private",
    "select_multikrum",
]
