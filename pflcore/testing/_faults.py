"""Faults of an algorithm, and comparisons of tensors that find them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from pflcore.algorithms._protocol import SharedRows, Tensors

MISSING = torch.empty(0, 0, 0)  # takes the place of a tensor that one side lacks


class Fault(AssertionError):
    """A fault of an algorithm or an op, described in one sentence."""


class Tolerance(NamedTuple):
    """The differences up to which two results are equal, as in `torch.allclose`.

    Attributes:
        rtol: The relative tolerance.
        atol: The absolute tolerance.
    """

    rtol: float
    atol: float


EXACT = Tolerance(0.0, 0.0)
# Equal up to rounding, where clients are summed in another order.
CLOSE = Tolerance(1e-7, 1e-9)


@contextmanager
def errors_as_faults(hook: str, place: str = "") -> Iterator[None]:
    """A context in which an error becomes a Fault of a hook.

    Args:
        place: The round and the clients, as words behind the kind of the error.
    """
    try:
        yield
    except Fault:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else "without a message"
        kind = type(error).__name__
        raise Fault(f"{hook}: raised {kind}{place}: {reason}") from error


def describe_clients(count: int, n: int) -> str:
    """The words for a cohort's size in the sentence of a Fault."""
    return f" with {count} of {n} clients"


def copies_of(payload: Mapping[str, Any]) -> Tensors:
    """Copies of a payload's tensors."""
    copies = {}
    for key, value in payload.items():
        tensor = value.rows if isinstance(value, SharedRows) else value
        copies[key] = tensor.clone()
    return copies


def first_difference(a: Tensors, b: Tensors, tolerance: Tolerance) -> str | None:
    """The name of the first tensor that differs, or None."""
    for key in {**a, **b}:
        x = a.get(key, MISSING)
        y = b.get(key, MISSING)
        if x.shape != y.shape or x.dtype != y.dtype:
            return key
        if not torch.allclose(x.double(), y.double(), *tolerance, equal_nan=True):
            return key
    return None


def require_same(
    a: Tensors, b: Tensors, fault: str, tolerance: Tolerance = EXACT
) -> None:
    """Raises Fault where the tensors differ by more than the tolerance.

    Args:
        fault: The sentence, in which {} takes the name of the first difference.
    """
    key = first_difference(a, b, tolerance)
    if key is not None:
        raise Fault(fault.format(key))


def non_finite_keys(tensors: Tensors) -> list[str]:
    """The names of the tensors with a number that is not finite."""
    return [key for key, value in tensors.items() if not value.isfinite().all()]
