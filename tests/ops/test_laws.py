"""Properties of every op on drawn inputs, and errors of bad input.

The ops run on every path of the kernels and on the references.
"""

import inspect
import warnings
from fractions import Fraction

import hypothesis.strategies as st
import laws
import pytest
import torch
from hypothesis import given
from small import crossed
from tolerance import F16, F32, F64, FLOATS
from ugly import refuses, same_for_any_threads

from pflcore import ops
from pflcore.interop import distributed

EACH = [(law, dtype) for law, dtypes in laws.LAWS.items() for dtype in dtypes]
CALLS = laws.calls(ops, torch.ops.pflcore.rank1_linear_backward, 1)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("law, dtype", EACH)
@given(st.data())
def test_definition(law, dtype, data):
    law(laws.CPU, dtype, data.draw)


@pytest.mark.parametrize("name, dtype", crossed(CALLS, FLOATS, one_in=1))
@pytest.mark.unless(  # torch chooses the order of a product's sums
    lambda isa, name: isa == "references" and name.startswith(("aggregate", "rank1"))
)
def test_threads_change_no_bit(isa, name, dtype):
    """Results have the same bits for any number of threads.

    The inputs are large enough to occupy all threads, and the result is written past
    the caches.
    """
    columns = 10_007 if isa == "references" else 120_011
    call, inputs = laws.calls(
        ops, torch.ops.pflcore.rank1_linear_backward, columns, dtype
    )[name]
    same_for_any_threads(
        lambda: call(*(t.clone() if isinstance(t, torch.Tensor) else t for t in inputs))
    )


# --- bad input --------------------------------------------------------------


def z(*shape, dtype=F32, **on):
    return torch.zeros(shape, dtype=dtype, **on)


INT = torch.int64
META = {"device": "meta"}
W = z(2, 3)
ROWS = z(4, 3)
MIX = {"updates": z(3, 5), "weight": torch.ones(2, 3)}
GOOD = {  # valid arguments of each op
    ops.pairwise_sqdist: {"a": z(2, 3), "b": z(4, 3)},
    ops.aggregate: MIX,
    ops.waffle_weights: {"dist": z(3), "target": 0, "omega": 0.5},
    ops.feddwa_weights: {"sqdist": z(2, 3), "k": 1},
    ops.rank1_linear: {"x": z(5, 7), "w_a": z(3, 6), "lam": z(6), "w_b": z(6, 7)},
    ops.sgd_step_: {"w": W, "grad": W, "lr": 0.1},
    ops.nearest: {"guide": z(2, 3), "rows": z(2, 3), "k": 1},
    ops.trimmed_mean: {"rows": z(5, 3), "removed": 2},
    ops.mean_around_median: {"rows": z(5, 3), "kept": 2},
    distributed.pairwise_sqdist: {"a": W},
    distributed.aggregate: MIX,
    distributed.to_columns: {"rows": W},
    distributed.to_rows: {"columns": W},
}
TENSOR = ["text", ["a"], 3]


def other_layouts():
    """Tensors that torch holds in another way than as one block of numbers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some of these layouts are new, or old
        return [
            ROWS.to_sparse(),
            ROWS.to_sparse_csr(),
            ROWS.to_mkldnn(),
            torch.quantize_per_tensor(ROWS, 0.1, 0, torch.qint8),
            torch.nested.nested_tensor([*ROWS]),
            torch.nested.nested_tensor([z(3), z(2)]),
            torch.nested.nested_tensor([z(3), z(2)], layout=torch.jagged),
        ]


OTHER_LAYOUTS = other_layouts()
FLOATS = [*TENSOR, ROWS.long(), ROWS.to(torch.complex64), *OTHER_LAYOUTS]
MATRIX = [*FLOATS, ROWS[0], ROWS[None]]
NUMBER = ["text", ["a"], ROWS, 10**400, Fraction(10**5000)]
INDEX = torch.zeros(2, 3, dtype=torch.int64)
# Values that are wrong for every op with an argument of this name.
JUNK = {
    **dict.fromkeys(
        ("a", "columns", "rows", "sqdist", "updates", "w", "w_a", "w_b"), MATRIX
    ),
    **dict.fromkeys(
        ("b", "base", "buffer", "dist", "grad", "lam", "shift", "x"), FLOATS
    ),
    **dict.fromkeys(("anchor", "mask", "out"), FLOATS),
    **dict.fromkeys(("lr", "momentum", "weight_decay"), NUMBER),
    **dict.fromkeys(("omega", "psi"), (*NUMBER, -1.0, torch.nan)),
    **dict.fromkeys(("count", "width"), ("3", ["a"], -1)),
    **dict.fromkeys(("group", "tie"), ("unknown", ["a"], 3)),
    "k": ["3", ["a"], -1, 0, 2.5, True],
    "index": [
        *("text", 3, ROWS, torch.full((3, 2), 99), z(3, dtype=INT)),
        *(INDEX.to_sparse(), torch.nested.nested_tensor([*INDEX])),
    ],
    "weight": [*MATRIX, torch.ones(4, 7)],
}
# Values that are wrong for one op, by the argument that the error message names.
TYPES = {
    ops.pairwise_sqdist: {"b": [z(2, 3, dtype=F16)], "index": [z(2, 1)]},
    ops.aggregate: {
        "weight": [z(2, 3, dtype=INT)],
        "index": [z(2, 3)],
        "base": [z(5, dtype=INT)],
    },
    ops.waffle_weights: {
        "target": [
            *(1.0, True, "text", None, z(1, dtype=torch.int32)),
            *(INDEX.to_sparse(), torch.nested.nested_tensor([*INDEX])),
        ]
    },
    ops.feddwa_weights: {"sqdist": [[[1.0]]]},
    ops.rank1_linear: {"w_a": [z(3, 6, dtype=F64)], "lam": [z(6, dtype=F16)]},
    ops.sgd_step_: {
        "w": [W.bfloat16()],
        "grad": [W.double()],
        "mask": [z(3, dtype=torch.bool)],
        "mu": ["x", z(2, dtype=torch.bool), *OTHER_LAYOUTS],
    },
    ops.nearest: {"rows": [z(2, 3, dtype=F64)]},
    ops.trimmed_mean: {"removed": [1.0, True, "text", None]},
    ops.mean_around_median: {"kept": [1.0, True, "text", None]},
}
VALUES = {
    ops.pairwise_sqdist: {
        "b": [z(2, 3, **META), z(4, 2)],
        "index": [
            z(3, 1, dtype=INT),
            torch.tensor([[0], [4]]),
            z(2, 1, dtype=INT, **META),
        ],
    },
    ops.aggregate: {
        "weight": [z(2, 3, **META)],
        "index": [z(2, 2, dtype=INT), torch.full((2, 3), 3), torch.full((2, 3), -1)],
        "base": [z(4), z(1, 5)],
        "out": [z(2, 4), z(2, 5, dtype=F64), z(5, 2).T, z(1, 5).expand(2, -1)],
    },
    ops.waffle_weights: {
        "dist": [z(2, 0), z()],
        "target": [3, -1, 2**70, z(1, dtype=INT)],
        "omega": [1e308],
        "psi": [torch.inf, 1e101],
    },
    ops.feddwa_weights: {"sqdist": [z(3, 0)]},
    ops.rank1_linear: {
        "x": [z()],
        "w_a": [z(3, 5)],
        "lam": [z(6, **META), z(4)],
        "w_b": [z(7)],
    },
    ops.sgd_step_: {
        "w": [z(3, 2).T, z(1, 3).expand(2, -1), W.clone().requires_grad_()],
        "grad": [z(2, 4)],
        "mu": [10**400],
        "shift": [z(2, 2)],
        "mask": [torch.ones(2)],
        "buffer": [z(3, 2).T, z(2, 2)],
    },
    ops.trimmed_mean: {"rows": [z(0, 3)], "removed": [-1, 3, 2**70]},
    ops.mean_around_median: {"rows": [z(0, 3)], "kept": [0, 6, 2**70]},
    ops.nearest: {"guide": [z(3)], "rows": [z(0, 3), z(2, 4)]},
    distributed.pairwise_sqdist: {"b": [z(4, 2)]},
    distributed.aggregate: {"index": [torch.full((2, 3), -1)]},
}
SEVERAL = [  # arguments that do not fit each other
    (ops.aggregate, "out", {"out": z(2, 5), "base": z(5, dtype=F64)}),
    (ops.waffle_weights, "target", {"dist": z(2, 3), "target": torch.tensor([0, 3])}),
    (ops.rank1_linear, "w_b", {"x": z(5, 8)}),
    (ops.rank1_linear, "w_a", {"w_b": z(5, 7)}),
    (ops.rank1_linear, "lam", {"x": z(4, 5, 7), "lam": z(3, 6)}),
    (ops.sgd_step_, "buffer", {"momentum": 0.9}),
    (ops.sgd_step_, "anchor", {"mu": 1.0}),
    (ops.sgd_step_, "mu", {"mu": torch.ones(3), "anchor": W}),
]


@pytest.mark.parametrize("op", GOOD)
def test_bad_input(op):
    """Bad input raises TypeError or ValueError with the op and the argument.

    The message is one sentence.
    """
    tried = [
        (kind, name, {name: value})
        for kind, table in ((TypeError, TYPES), (ValueError, VALUES))
        for name, values in table.get(op, {}).items()
        for value in values
    ]
    names = JUNK.keys() & inspect.signature(op).parameters
    either = (TypeError, ValueError)
    tried += [(either, name, {name: value}) for name in names for value in JUNK[name]]
    tried += [(ValueError, name, change) for of, name, change in SEVERAL if of is op]
    for kind, name, change in tried:
        with refuses(op.__name__, name, kind):
            op(**{**GOOD[op], **change})


@pytest.mark.parametrize("k", [2**63 - 1, 2**63, 2**70, 10**400])
def test_more_neighbours_than_int64_holds(k):
    """From N on all rows are taken, however large the number is."""
    rows = torch.tensor([[1.0], [3.0], [2.0]])

    weights = ops.feddwa_weights(rows.T, k)
    found = ops.nearest(rows, rows, k)

    laws.identical(weights, ops.feddwa_weights(rows.T, 3))
    laws.identical(found, ops.nearest(rows, rows, 3))


def test_every_op_is_tried():
    public = {f for f in map(vars(ops).get, ops.__all__) if inspect.isfunction(f)}
    assert GOOD.keys() >= public - {ops.backend}
