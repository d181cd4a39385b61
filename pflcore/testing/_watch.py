"""Watched algorithms, whose hooks check their arguments and their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any

from torch import Tensor

from pflcore.algorithms._protocol import Algorithm, Cohort, SharedRows
from pflcore.check import summarize
from pflcore.simulation._state import check_client_states, check_server_changes
from pflcore.testing._faults import (
    Fault,
    copies_of,
    describe_clients,
    errors_as_faults,
    require_same,
)
from pflcore.train import Clients

# The hooks, each with its first arguments, which the hook must not change.
HOOKS = {
    "init": (),
    "init_client": ("down",),
    "send": ("state",),
    "train": ("down", "client_state"),
    "update": ("state",),
    "model": ("down", "client_state"),
    "report": ("state",),
}
# The hooks that return a row for each client.
BY_CLIENT = ("send", "train", "model")


def watched_copy(alg: Algorithm) -> Algorithm:
    """A copy of the algorithm whose hooks are watched, see `_watched_hook`.

    Its class is derived from the algorithm's own class.
    """
    cls = type(alg)
    hooks = {name: _watched_hook(cls, name) for name in HOOKS}
    new = copy(alg)
    # The algorithm is frozen, so its class cannot be assigned in the usual way.
    object.__setattr__(new, "__class__", type(cls.__name__, (cls,), hooks))
    return new


def _watched_hook(cls: type[Algorithm], name: str) -> Callable[..., Any]:
    """The hook of a class, with checks of arguments and result.

    It raises Fault where the hook fails, changes an argument, or returns tensors
    without a row for each client. "train" also adds the uploads to `self._uploads`.
    """

    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        payloads = dict(zip(HOOKS[name], args, strict=False))
        before = {key: copies_of(payload) for key, payload in payloads.items()}
        count, place = _clients_of(args)
        with errors_as_faults(name, place):
            returned = getattr(cls, name)(self, *args, **kwargs)
        for key, payload in payloads.items():
            fault = (
                f"{name}: {key}[{{!r}}] was changed in place; it is not the hook's "
                "own, so work on a copy."
            )
            require_same(copies_of(payload), before[key], fault)
        if name == "train":
            client_state, upload, *_ = returned
            _require_rows(name, client_state, count)
            _require_rows(name, upload, count)
            _require_form(check_client_states, args[1], client_state)
            self._uploads.append(copies_of(upload))
        elif name == "update":
            _require_form(check_server_changes, self, args[0], returned[0])
        elif name in BY_CLIENT:
            _require_rows(name, returned, count)
        return returned

    return hook


def _clients_of(args: Sequence[Any]) -> tuple[int, str]:
    """The number of clients of a hook's call, and its words."""
    for argument in args:
        if isinstance(argument, Cohort):
            count = len(argument.ids)
            return count, describe_clients(count, argument.n)
        if isinstance(argument, Clients):
            count = len(argument.ids)
            return count, describe_clients(count, argument.context.data.n)
    return 0, ""


def _require_form(check: Callable[..., None], *states: Any) -> None:
    """Raises Fault where a check of the states' form raises ValueError."""
    try:
        check(*states)
    except ValueError as error:
        raise Fault(str(error)) from None


def _require_rows(name: str, payload: Mapping[str, Any], count: int) -> None:
    """Raises Fault unless a payload has a row for each client.

    Sent bytes are counted by these rows.
    """
    for key, value in payload.items():
        rows = value.index if isinstance(value, SharedRows) else value
        if not isinstance(rows, Tensor) or rows.shape[:1] != (count,):
            raise Fault(
                f"{name}: expected a tensor with one row for each of the {count} "
                f"clients as {key!r}, got {summarize(rows)}."
            )
