"""Checks of an op against a reference in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket
from torch.library import opcheck
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves, tree_map_only

from pflcore.check import NonNegativeFloat, NonNegativeInt, checked
from pflcore.testing._faults import Fault

SIZES = (0, 1, 2, 3, 7, 8, 13, 16, 17, 31, 64, 127, 257, 1031)
# Numbers of guards around a tensor, and between its rows.
MARGIN = 3
GAP = 5
Arguments = tuple[Any, ...]


class Guarded(NamedTuple):
    """A tensor in the middle of memory that holds guards.

    Attributes:
        tensor: The tensor [...].
        home: The whole memory, 1-D.
    """

    tensor: Tensor
    home: Tensor

    @property
    def is_intact(self) -> bool:
        """True where no guard has changed."""
        home = self.home.clone()
        t = self.tensor
        home.as_strided(t.shape, t.stride(), t.storage_offset()).fill_(guard_of(t))
        if home.is_floating_point() or home.is_complex():
            return bool(home.isnan().all())
        return bool((home == guard_of(t)).all())


@checked
def check_op(
    op: Callable[..., Any],
    reference: Callable[..., Any],
    arguments: Callable[[int], Arguments],
    *,
    sizes: Sequence[NonNegativeInt] = SIZES,
    gradients: bool = True,
    rtol: NonNegativeFloat | None = None,
    atol: NonNegativeFloat | None = None,
) -> None:
    """Raises Fault where an op does not do what its reference does.

    For each size it compares

    - values, shapes and dtypes of the results, and of the arguments after the call, so
      that an op may write to its arguments where the reference does;
    - the same for arguments in other memory: shifted, with gaps between the rows, and
      transposed. The gaps hold NaN (integers: a number that no index is), so that a
      read past a row shows, and so does a write. An op may refuse gaps and transposed
      arguments by an error;
    - gradients, for dense gradients of the results and for expanded ones, as those of
      a sum are.

    An op that is registered with torch, such as `torch.ops.my.op`, goes through
    `torch.library.opcheck` at the smallest and the largest size: schema, autograd, and
    the shapes that its fake gives without values.

    Args:
        op: The op: a function, or one that is registered with torch.
        reference: A function of the same arguments in plain torch.
        arguments: `arguments(size)` returns the arguments for a size, a tuple. It may
            draw from torch's generator, which is seeded before each call.
        sizes: The sizes; by default from 0 to 1031, with primes and powers of two.
        gradients: False where the op has no gradients.
        rtol: The relative tolerance; None with `atol` for that of
            `torch.testing.assert_close`, which depends on the dtype.
        atol: The absolute tolerance.
    """
    call = _OpCheck(op, reference, {"rtol": rtol, "atol": atol})
    for size in sizes:
        args = _draw(arguments, size)
        call.check_values(args, f"size {size}")
        for layout in LAYOUTS:
            call.check_layout(args, layout, size)
        if gradients:
            call.check_gradients(args, size)
    registered = overload_of(op)
    positive = [size for size in sizes if size]
    if registered is not None and positive:
        for size in sorted({min(positive), max(positive)}):
            args = _draw(arguments, size)
            call.check_registration(registered, args, size, gradients)


class _OpCheck(NamedTuple):
    """An op and its reference.

    Attributes:
        op: The op.
        reference: The reference.
        tolerance: The arguments `rtol` and `atol` of `assert_close`.
    """

    op: Callable[..., Any]
    reference: Callable[..., Any]
    tolerance: dict[str, Any]

    def check_values(self, args: Arguments, where: str) -> None:
        """Raises Fault where results, or arguments after the call, differ."""
        expected_args = _copies(args)
        expected = self.reference(*expected_args)
        own_args = _copies(args)
        result = self._run(own_args, where)
        self._compare(result, expected, f"the result at {where}")
        self._compare(own_args, expected_args, f"an argument after the call at {where}")

    def check_layout(self, args: Arguments, layout: str, size: int) -> None:
        """Raises Fault where the op is wrong for arguments in other memory."""
        where = f"size {size}, with {layout} arguments"
        expected_args = _copies(args)
        expected = self.reference(*expected_args)
        guarded: list[Guarded] = []

        def lay(tensor: Tensor) -> Tensor:
            guarded.append(in_layout(tensor, layout))
            return guarded[-1].tensor

        own_args = tree_map_only(Tensor, lay, args)
        try:
            result = self.op(*own_args)
        except Exception as error:
            if layout != "shifted":
                return  # an op may refuse what is not contiguous
            raise self._fault(f"raised {_in_words(error)} at {where}") from error
        self._compare(result, expected, f"the result at {where}")
        self._compare(own_args, expected_args, f"an argument after the call at {where}")
        if not all(each.is_intact for each in guarded):
            raise self._fault(f"wrote outside of its arguments at {where}")

    def check_gradients(self, args: Arguments, size: int) -> None:
        """Raises Fault where gradients differ from those of the reference."""
        for kind in ("dense", "expanded"):
            where = f"size {size}, for {kind} gradients of the results"
            expected = _gradients(self.reference, args, kind)
            if expected is None:
                return
            try:
                result = _gradients(self.op, args, kind)
            except Exception as error:
                reason = _in_words(error)
                raise self._fault(f"backward raised {reason} at {where}") from error
            if result is None:
                raise self._fault(
                    f"has no gradients at {where}, and its reference has; register "
                    "them, or give gradients=False"
                )
            self._compare(result, expected, f"a gradient at {where}")

    def check_registration(
        self, op: OpOverload, args: Arguments, size: int, gradients: bool
    ) -> None:
        """Raises Fault where torch's own checks of a registered op fail."""
        own_args = _with_gradients(args) if gradients else _copies(args)
        try:
            opcheck(op, own_args)
        except Exception as error:
            reason = _in_words(error)
            raise self._fault(f"fails opcheck at size {size}: {reason}") from error

    def _run(self, args: Arguments, where: str) -> Any:
        """The op's result; an error of it is a Fault."""
        try:
            return self.op(*args)
        except Exception as error:
            raise self._fault(f"raised {_in_words(error)} at {where}") from error

    def _compare(self, result: Any, expected: Any, what: str) -> None:
        """Raises Fault where two results differ in form, dtype or values."""
        pairs = [tree_leaves(result), tree_leaves(expected)]
        if len(pairs[0]) != len(pairs[1]):
            counts = f"{len(pairs[0])} values, expected {len(pairs[1])}"
            raise self._fault(f"{what}: got {counts}")
        for got, want in zip(*pairs, strict=True):
            if not isinstance(want, Tensor):
                continue
            try:
                assert_close(got, want, equal_nan=True, **self.tolerance)
            except AssertionError as error:
                raise self._fault(f"{what}: {_in_words(error)}") from error

    def _fault(self, text: str) -> Fault:
        """The Fault with this text behind the op's name."""
        name = getattr(self.op, "__name__", None) or str(self.op)
        return Fault(f"{name}: {text}.")


def overload_of(op: Any) -> OpOverload | None:
    """The overload of a registered op; None for a plain function."""
    if isinstance(op, CustomOpDef):
        return op._opoverload
    if isinstance(op, OpOverloadPacket):
        return getattr(op, op.overloads()[0])  # type: ignore[no-any-return]
    return op if isinstance(op, OpOverload) else None


def _draw(arguments: Callable[[int], Arguments], size: int) -> Arguments:
    """The arguments of a size, always the same ones."""
    with torch.random.fork_rng():
        torch.manual_seed(size)
        return tuple(arguments(size))


def _copies(args: Arguments) -> Arguments:
    """The arguments with copies of their tensors, without gradients."""
    return tree_map_only(Tensor, lambda t: t.detach().clone(), args)  # type: ignore[no-any-return]


def _with_gradients(args: Arguments) -> Arguments:
    """Copies of the arguments whose floating-point tensors require gradients."""

    def leaf(tensor: Tensor) -> Tensor:
        copy = tensor.detach().clone()
        return copy.requires_grad_(copy.is_floating_point())

    return tree_map_only(Tensor, leaf, args)  # type: ignore[no-any-return]


def _gradients(
    function: Callable[..., Any], args: Arguments, kind: str
) -> list[Tensor] | None:
    """The gradients of a function's arguments; None where it has none.

    An argument that the results do not depend on has a gradient of zeros.

    Args:
        kind: "dense" for drawn gradients of the results, "expanded" for those that a
            sum of the results has.
    """
    leaves = _with_gradients(args)
    wanted = [t for t in tree_leaves(leaves) if isinstance(t, Tensor)]
    wanted = [t for t in wanted if t.requires_grad]
    if not wanted:
        return None
    results = [t for t in tree_leaves(function(*leaves)) if isinstance(t, Tensor)]
    results = [t for t in results if t.requires_grad]
    if not results:
        return None
    with torch.random.fork_rng():
        torch.manual_seed(len(results))
        if kind == "dense":
            outer = [torch.randn_like(t) for t in results]
        else:
            outer = [torch.ones_like(t[..., :1].sum()).expand_as(t) for t in results]
    return list(
        torch.autograd.grad(
            results, wanted, outer, allow_unused=True, materialize_grads=True
        )
    )


def guard_of(tensor: Tensor) -> Any:
    """The value around a tensor: NaN, or a number that no index is."""
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.nan
    if tensor.dtype == torch.bool:
        return True
    limits = torch.iinfo(tensor.dtype)
    return limits.min or limits.max


def in_layout(tensor: Tensor, layout: str) -> Guarded:
    """A copy of a tensor [...] in another layout, with guards around it.

    Args:
        layout: "shifted" for the same strides at another place, "wide" for gaps
            between the rows, "transposed" for the last two dimensions exchanged in
            memory.
    """
    shape = list(tensor.shape)
    if layout == "wide" and shape:
        shape[-1] += GAP
    is_transposed = layout == "transposed" and tensor.dim() > 1
    if is_transposed:
        shape[-1], shape[-2] = shape[-2], shape[-1]
    strides = list(torch.empty(shape, device="meta").stride())
    if is_transposed:
        strides[-1], strides[-2] = strides[-2], strides[-1]
    count = torch.Size(shape).numel()
    home = tensor.new_full((count + 2 * MARGIN,), guard_of(tensor))
    place = home.as_strided(tensor.shape, strides, MARGIN)
    return Guarded(place.copy_(tensor.detach()), home)


LAYOUTS = ("shifted", "wide", "transposed")


def _in_words(error: BaseException) -> str:
    """An error's kind and its text in one line."""
    lines: Iterator[str] = (line.strip() for line in str(error).splitlines())
    text = " ".join(line for line in lines if line).rstrip(".")
    return f"{type(error).__name__}: {text}"
