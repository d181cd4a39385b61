"""`check_op` finds each fault of an op, and passes one that is right."""

import re
from pathlib import Path

import pytest
import torch

from pflcore import ops
from pflcore.testing import Fault, check_op

SIZES = (0, 1, 3, 8, 17)


def arguments(size):
    return torch.randn(3, size), torch.randn(size)


def reference(x, y):
    return (x * y).sum(1)


def strided(x, shape, offset=0):
    return x.as_strided(shape, (x.shape[1], 1), x.storage_offset() + offset)


def registered(name, forward, *, fake=None, backward=None):
    """An op of a library of its own."""

    @torch.library.custom_op(f"check_op_test::{name}", mutates_args=())
    def op(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return forward(x, y)

    op.register_fake(fake or (lambda x, y: x.new_empty(len(x))))
    op.register_autograd(
        backward or (lambda ctx, g: (g[:, None] * ctx.y, (g[:, None] * ctx.x).sum(0))),
        setup_context=keep,
    )
    return op


def keep(ctx, inputs, output):
    ctx.x, ctx.y = inputs


@pytest.mark.deep("it takes a second")
def test_an_op_that_is_right_passes():
    op = registered("right", lambda x, y: reference(x, y))
    check_op(op, reference, arguments, sizes=SIZES)
    check_op(torch.ops.check_op_test.right, reference, arguments, sizes=SIZES)
    check_op(lambda x, y: x @ y, reference, arguments, sizes=SIZES, atol=1e-5, rtol=0)


def test_the_ops_of_this_package_pass():
    def distances(a):
        return (a[:, None].double() - a.double()).square().sum(2)

    options = {"sizes": SIZES, "rtol": 1e-5, "atol": 1e-6}
    rows = lambda size: (torch.randn(4, size),)  # noqa: E731
    check_op(ops.pairwise_sqdist, distances, rows, **options)


def test_an_op_may_write_to_its_arguments():
    def add(x, y):
        return x.add_(y)

    check_op(add, add, arguments, sizes=SIZES, gradients=False)
    with pytest.raises(Fault, match="an argument after the call at size 1: "):
        check_op(add, torch.add, arguments, sizes=[1], gradients=False)


def blocks_of_eight(x, y):
    width = x.shape[1] // 8 * 8
    return (x[:, :width] * y[:width]).sum(1)


def past_the_last_row(x, y):
    """Reads one number behind each row of a tensor whose rows touch each other."""
    if x.storage_offset():
        last = strided(x, (3, 1), x.shape[1])
        return reference(x, y) + 0 * last[:, 0]
    return reference(x, y)


def ignores_strides(x, y):
    return reference(strided(x, x.shape), y)


def writes_behind(x, y):
    if x.storage_offset():
        strided(x, (1, 1), x.numel()).zero_()
    return reference(x, y)


@pytest.mark.parametrize(
    "op, words",
    [
        (lambda x, y: (x * y).sum(0), "the result at size 0: .*shape"),
        (lambda x, y: reference(x, y).double(), "the result at size 0: .*dtype"),
        (blocks_of_eight, "the result at size 1: .*not close"),
        (past_the_last_row, "the result at size 1, with shifted arguments: "),
        (ignores_strides, "the result at size 1, with wide arguments: "),
        (writes_behind, "wrote outside of its arguments at size 1, with shifted"),
        (lambda x, y: reference(x, y.view(4)), "raised RuntimeError: .* at size 1"),
        (lambda x, y: (reference(x, y), 1), "the result at size 1: got 2 values"),
    ],
)
def test_wrong_values_are_found(op, words):
    sizes = (0,) if "size 0" in words else (1, 8)
    with pytest.raises(Fault, match=words):
        check_op(op, reference, arguments, sizes=sizes, gradients=False)


def wrong_gradient(ctx, g):
    return 2 * g[:, None] * ctx.y, (g[:, None] * ctx.x).sum(0)


def dense_gradient(ctx, g):
    flat = g.as_strided((3,), (1,)) if g.untyped_storage().size() > 4 else 0 * g
    return flat[:, None] * ctx.y, (flat[:, None] * ctx.x).sum(0)


@pytest.mark.parametrize(
    "backward, words",
    [
        (wrong_gradient, "a gradient at size 3, for dense gradients of the results: "),
        (dense_gradient, "a gradient at size 3, for expanded gradients"),
        (lambda ctx, g: 1 / 0, "backward raised ZeroDivisionError: .* at size 3"),
    ],
)
def test_wrong_gradients_are_found(backward, words, request):
    name = backward.__name__.strip("<>")
    op = registered(name, reference, backward=backward)
    with pytest.raises(Fault, match=words):
        check_op(op, reference, arguments, sizes=[3])


def test_absent_gradients_are_found():
    def op(x, y):
        return reference(x.detach(), y.detach())

    with pytest.raises(Fault, match=r"has no gradients at size 3.*gradients=False"):
        check_op(op, reference, arguments, sizes=[3])
    check_op(op, reference, arguments, sizes=[3], gradients=False)


@pytest.mark.deep("it takes a second")
def test_wrong_fake_shapes_are_found():
    op = registered(
        "shape", lambda x, y: reference(x, y), fake=lambda x, y: x.new_empty(4)
    )
    with pytest.raises(Fault, match=r"fails opcheck at size 3: .*[Ss]hape"):
        check_op(op, reference, arguments, sizes=[3])


def test_arguments_of_a_size_are_always_the_same():
    seen = []

    def draw(size):
        seen.append(torch.rand(size))
        return (seen[-1],)

    torch.manual_seed(0)
    want = torch.rand(2)
    for _ in range(2):
        torch.manual_seed(0)
        check_op(torch.sin, torch.sin, draw, sizes=[5])
        assert torch.equal(torch.rand(2), want)
    assert torch.equal(seen[0], seen[1])


@pytest.mark.deep("it takes a second")
def test_the_page_runs():
    page = Path(__file__).parents[1] / "docs" / "own_op.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    exec(code, {})
