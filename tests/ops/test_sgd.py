"""Tests of `sgd_step_`: shared rows, and memory that overlaps."""

import pytest
import torch
from ugly import randn, refuses

from pflcore import ops


def test_shared_rows_are_read():
    """An expanded anchor or shift is one row for all clients."""
    w = torch.zeros(4, 50)
    one = torch.ones(1, 50).expand(4, 50)
    ops.sgd_step_(w, torch.zeros(4, 50), 1.0, shift=one, mu=1.0, anchor=2 * one)
    assert (w == 1).all()  # 0 - (1 + (0 - 2))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("columns", [16_384, 16_385, 40_001])
def test_long_rows_take_the_step_of_each_part(columns, gap):
    """A long row takes the same step as its parts.

    Rows are processed in strips. Rows with gaps between them are processed one by one.
    """
    w, grad, shift, anchor, buffer = (
        randn(k, 3, columns + gap)[:, :columns] for k in range(5)
    )
    mu = torch.tensor([0.1, 0.5, 2.0], dtype=torch.float64)
    parts = [slice(0, 7), slice(7, 16_390), slice(16_390, None)]
    want = w.clone()
    after = buffer.clone()
    for i in range(3):
        for part in parts:
            rows = [one[i : i + 1, part] for one in (want, grad, shift, anchor, after)]
            ops.sgd_step_(
                *rows[:2], 0.1, rows[2], None, float(mu[i]), rows[3], 0.9, rows[4], 0.01
            )

    ops.sgd_step_(w, grad, 0.1, shift, None, mu, anchor, 0.9, buffer, 0.01)

    assert torch.equal(w, want)
    assert torch.equal(buffer, after)


# --- memory -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["grad", "shift", "mask", "anchor", "mu", "buffer"])
def test_memory_that_meets_is_refused(name):
    """Inputs that overlap w or the buffer are refused.

    Their values would change while the op reads them.
    """
    home = randn(0, 7, 9)

    def step(first, buffer, refused):
        part = home[first, 1:4] if name == "mu" else home[first - 1 : first + 2]
        others = {
            "grad": home.new_zeros(3, 9),
            "anchor": home.new_zeros(3, 9),
            "buffer": buffer,
        }
        with refuses("sgd_step_", refused):
            ops.sgd_step_(home[:3], lr=0.1, momentum=0.9, **{**others, name: part})

    step(2, home.new_zeros(3, 9), name)
    if name != "buffer":
        step(5, home[4:], "buffer")


def test_the_row_itself_may_be_read_too():
    w = randn(1, 3, 9)
    want = w - 0.5 * w
    ops.sgd_step_(w, w, 0.5, anchor=w, mu=3.0)
    assert torch.equal(w, want)


@pytest.mark.parametrize(
    "name", ["w", "grad", "shift", "mask", "anchor", "mu", "buffer"]
)
def test_a_step_that_autograd_would_record_is_refused(name):
    """Also under `torch.compile`, which would drop the gradient in silence."""
    rows = {k: torch.ones(2, 3) for k in ("w", "grad", "shift", "anchor", "buffer")}
    rows |= {"mask": torch.ones(3), "mu": torch.ones(2)}
    rows[name].requires_grad_()

    def step():
        ops.sgd_step_(lr=0.1, momentum=0.5, **rows)

    compiled = torch.compile(step, backend="aot_eager")
    for call in (step, compiled):
        with refuses("sgd_step_", name):
            call()
    with torch.no_grad():
        step()
        compiled()


def test_other_columns_of_one_matrix_share_no_memory():
    whole = randn(1, 4, 31)
    parts = [whole[:, :10], whole[:, 10:20], whole[:, 21:]]
    w, grad, buffer = [t.clone() for t in parts]
    ops.sgd_step_(w, grad, 0.1, momentum=0.9, buffer=buffer)
    between = whole[:, 20].clone()
    ops.sgd_step_(parts[0], parts[1], 0.1, momentum=0.9, buffer=parts[2])
    assert torch.equal(whole, torch.cat([w, grad, between[:, None], buffer], 1))
    for start in (0, 3, 11):
        with refuses("sgd_step_", "grad"):
            ops.sgd_step_(whole[:, 2:12], whole[:, start : start + 10], 0.1)
