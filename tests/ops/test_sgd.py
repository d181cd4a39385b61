"""sgd_step_: one pass of SGD on flat rows, against the formula and against torch.optim.SGD."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tolerance import F32, F64, assert_close
from ugly import LAYOUTS, lay, randn, refuses, same_for_any_threads

from pflcore import ops

SWITCH = st.sampled_from([False, True])


def formula(w, grad, lr, shift, mask, mu, anchor, momentum, buffer, weight_decay):
    """In float64: new w, new buffer."""
    w, d = w.double(), grad.double()
    if shift is not None:
        d = d + shift.double()
    if anchor is not None:
        d = d + (mu.double()[:, None] if isinstance(mu, torch.Tensor) else mu) * (
            w - anchor.double()
        )
    d = d + weight_decay * w
    if momentum:
        buffer = momentum * buffer.double() + d
        d = buffer
    return w - lr * (1 if mask is None else mask.double()) * d, buffer


@pytest.mark.usefixtures("isa")
@given(
    st.sampled_from([0, 1, 2, 5]),
    st.sampled_from([0, 1, 3, 16, 17, 257, 5003]),
    st.sampled_from([F32, F64]),
    SWITCH,
    st.sampled_from([None, "row", "matrix"]),
    st.sampled_from([None, "float", "rows"]),
    st.sampled_from([0.0, 0.9]),
    st.sampled_from([0.0, 0.01]),
    st.sampled_from(LAYOUTS),
    st.sampled_from(LAYOUTS[:3]),
    st.integers(0, 99),
)
def test_formula(
    s, q, dtype, with_shift, mask_kind, mu_kind, momentum, weight_decay, layout, written, seed
):
    gen = torch.Generator().manual_seed(seed)

    def make(*shape, place=layout):
        t = torch.randn(*shape, generator=gen).to(dtype)
        return lay(t, place) if len(shape) == 2 else lay(t[None], place)[0]

    w, grad, shift = make(s, q, place=written), make(s, q), make(s, q) if with_shift else None
    mask = (
        None
        if mask_kind is None
        else (make(q) if mask_kind == "row" else make(s, q)).gt(0).to(dtype)
    )
    anchor = None if mu_kind is None else make(s, q)
    mu = {None: 0.0, "float": 0.3, "rows": torch.rand(s, generator=gen)}[mu_kind]
    buffer = make(s, q, place=written) if momentum else None
    want, want_buffer = formula(
        w, grad, 0.1, shift, mask, mu, anchor, momentum, buffer, weight_decay
    )
    start, size = w.clone(), 20 * torch.ones_like(want)  # ten terms of size 2
    assert (
        ops.sgd_step_(w, grad, 0.1, shift, mask, mu, anchor, momentum, buffer, weight_decay) is None
    )
    assert_close(w, want, "sgd", dtype, size)
    if momentum:
        assert_close(buffer, want_buffer, "sgd", dtype, size)
    if mask is not None:
        frozen = mask.expand(s, q) == 0
        assert torch.equal(w[frozen], start[frozen]), "what is masked does not move"


@pytest.mark.usefixtures("isa")
def test_like_torch_optim():
    """Three steps with momentum and weight decay."""
    gen = torch.Generator().manual_seed(0)
    ours = torch.randn(3, 1001, generator=gen)
    theirs, buffer = torch.nn.Parameter(ours.clone()), torch.zeros_like(ours)
    optimizer = torch.optim.SGD([theirs], lr=0.1, momentum=0.9, weight_decay=0.01)
    for _ in range(3):
        grad = torch.randn(3, 1001, generator=gen)
        ops.sgd_step_(ours, grad, 0.1, momentum=0.9, buffer=buffer, weight_decay=0.01)
        theirs.grad = grad
        optimizer.step()
    torch.testing.assert_close(ours, theirs.detach())


@pytest.mark.usefixtures("isa")
def test_threads_change_no_bit():
    gen = torch.Generator().manual_seed(1)
    w, grad, anchor = (torch.randn(5, 100_003, generator=gen) for _ in range(3))

    def step():
        new = w.clone()
        ops.sgd_step_(new, grad, 0.1, mu=0.5, anchor=anchor, weight_decay=0.1)
        return new

    same_for_any_threads(step)


@pytest.mark.parametrize("dtype", [F32, F64])
def test_proximal_steps_end_at_the_proximal_point(dtype):
    """argmin |w - c|^2 / 2 + mu |w - a|^2 / 2 = (c + mu a) / (1 + mu), a mu for each client."""
    c, a = randn(1, 4, 13, dtype=dtype), randn(2, 4, 13, dtype=dtype)
    mu = torch.tensor([0.0, 0.5, 1.0, 4.0], dtype=dtype)
    w = torch.zeros(4, 13, dtype=dtype)
    for _ in range(200):
        ops.sgd_step_(w, w - c, 0.15, mu=mu, anchor=a)
    torch.testing.assert_close(w, (c + mu[:, None] * a) / (1 + mu[:, None]), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [F32, F64])
def test_nothing_beside_the_rows_is_written_and_masked_numbers_stay(dtype):
    home, memory = torch.full((5, 71), 7.0, dtype=dtype), torch.full((5, 67), 7.0, dtype=dtype)
    w, buffer = home[1:4, 5:66], memory[1:4, 2:63]
    mask = (torch.arange(61) % 3 == 0).to(dtype)
    ops.sgd_step_(w, randn(1, 3, 61, dtype=dtype), 0.1, mask=mask, momentum=0.9, buffer=buffer)
    assert bool((w[:, mask == 0] == 7.0).all()) and not bool((w[:, mask == 1] == 7.0).any())
    w.fill_(7.0)
    buffer.fill_(7.0)
    assert bool((home == 7.0).all()) and bool((memory == 7.0).all())


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [F32, F64])
def test_a_row_alone_takes_the_same_step(dtype):
    """Bit for bit: a client's training does not depend on who trains beside it."""
    w, grad, shift, anchor, buffer = (randn(n, 5, 131, dtype=dtype) for n in range(5))
    mu = torch.rand(5, generator=torch.Generator().manual_seed(0), dtype=F64)
    together, memory = w.clone(), buffer.clone()
    ops.sgd_step_(together, grad, 0.1, shift, None, mu, anchor, 0.9, memory, 1e-3)
    for i in range(5):
        one = slice(i, i + 1)
        alone, own = w[one].clone(), buffer[one].clone()
        ops.sgd_step_(alone, grad[one], 0.1, shift[one], None, mu[one], anchor[one], 0.9, own, 1e-3)
        assert torch.equal(alone, together[one]) and torch.equal(own, memory[one])


def test_shared_rows_are_read():
    """An expanded anchor or shift is one row for all clients."""
    w = torch.zeros(4, 50)
    ops.sgd_step_(
        w,
        torch.zeros(4, 50),
        1.0,
        shift=torch.ones(1, 50).expand(4, 50),
        mu=1.0,
        anchor=torch.full((1, 50), 2.0).expand(4, 50),
    )
    assert (w == 1).all()  # 0 - (1 + (0 - 2))


W = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (
            lambda: ops.sgd_step_(torch.zeros(3), torch.zeros(3), 0.1),
            ValueError,
            r"w must be a matrix \[S, Q\]",
        ),
        (
            lambda: ops.sgd_step_(W.bfloat16(), W.bfloat16(), 0.1),
            TypeError,
            "w must be float32 or float64",
        ),
        (
            lambda: ops.sgd_step_(W, torch.zeros(2, 4), 0.1),
            ValueError,
            r"grad must be \[2, 3\] like w",
        ),
        (lambda: ops.sgd_step_(W, W.double(), 0.1), TypeError, "grad must be torch.float32 like w"),
        (
            lambda: ops.sgd_step_(W, W, 0.1, momentum=0.9),
            ValueError,
            "buffer must be .* where momentum is 0.9",
        ),
        (
            lambda: ops.sgd_step_(W, W, 0.1, mu=1.0),
            ValueError,
            "anchor must be .* where mu is given",
        ),
        (
            lambda: ops.sgd_step_(W, W, 0.1, mu=torch.ones(3), anchor=W),
            ValueError,
            r"mu must be a number or \[2\]",
        ),
        (
            lambda: ops.sgd_step_(torch.zeros(3, 2).T, W, 0.1),
            ValueError,
            "w must be of contiguous rows",
        ),
        (
            lambda: ops.sgd_step_(torch.zeros(1, 3).expand(2, -1), W, 0.1),
            ValueError,
            "w must be of rows that do not overlap",
        ),
        (
            lambda: ops.sgd_step_(W, W, 0.1, momentum=0.9, buffer=torch.zeros(3, 2).T),
            ValueError,
            "buffer must be of contiguous rows",
        ),
        (lambda: ops.sgd_step_(W, W, 0.1, shift=0.0), TypeError, "shift must be a tensor"),
        (
            lambda: ops.sgd_step_(W, W, 0.1, mask=torch.ones(3, dtype=torch.bool)),
            TypeError,
            "mask must be torch.float32",
        ),
        (
            lambda: ops.sgd_step_(W, W, "fast"),
            TypeError,
            "lr must be a number, got 'fast' of type str",
        ),
        (lambda: ops.sgd_step_(W, W, 0.1, mu="x", anchor=W), TypeError, "mu must be a number"),
        (lambda: ops.sgd_step_(W.to_sparse(), W, 0.1), TypeError, "w must be a dense tensor"),
        (
            lambda: ops.sgd_step_(W.clone().requires_grad_(), W, 0.1),
            ValueError,
            "w must be free of autograd",
        ),
        (lambda: ops.sgd_step_(W, W, 0.1, mask=torch.ones(2)), ValueError, "mask must be"),
    ],
)
def test_bad_input(call, kind, words):
    with pytest.raises(kind, match=words) as error:
        call()
    assert str(error.value).startswith("sgd_step_: ") and "\n" not in str(error.value)


# --- memory -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["grad", "shift", "mask", "anchor", "mu", "buffer"])
def test_memory_that_meets_is_refused(name):
    """A part of w, or of the buffer, that moves while it is read."""
    home = torch.randn(7, 9, dtype=F64, generator=torch.Generator().manual_seed(0))
    w, part = home[:3], home[2, 1:4] if name == "mu" else home[1:4]
    arguments = {
        "grad": torch.zeros(3, 9, dtype=F64),
        "anchor": torch.zeros(3, 9, dtype=F64),
        name: part,
    }
    if name == "buffer":
        arguments["momentum"] = 0.9
    with refuses("sgd_step_", name):
        ops.sgd_step_(w, lr=0.1, **arguments)
    arguments = {
        **arguments,
        "momentum": 0.9,
        "buffer": home[4:],
        name: home[4, :3] if name == "mu" else home[4:],
    }
    if name != "buffer":
        with refuses("sgd_step_", "buffer"):
            ops.sgd_step_(w, lr=0.1, **arguments)


def test_the_row_itself_may_be_read_too():
    w = torch.randn(3, 9, dtype=F64, generator=torch.Generator().manual_seed(1))
    want = w - 0.5 * w
    ops.sgd_step_(w, w, 0.5, anchor=w, mu=3.0)
    assert torch.equal(w, want)
