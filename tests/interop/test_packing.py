"""Every form of clients' models becomes rows and comes back.

Models that do not fit are refused with one sentence.
"""

import warnings
from collections import OrderedDict

import numpy as np
import pytest
import torch
from entry_points import sentence
from hypothesis import given
from hypothesis import strategies as st
from places import tabled
from small import layers
from torch import nn
from torch.testing import assert_close
from torch.utils._pytree import tree_map

from pflcore import pack, unpack

SHAPES = st.lists(
    st.lists(st.integers(0, 3), max_size=3).map(tuple), min_size=1, max_size=4
)
DTYPES = st.sampled_from(["float16", "float32", "float64"])


class Array:
    """A stand-in with the attributes that `pack` reads from a Flower Array."""

    stype = "numpy.ndarray"

    def __init__(self, array):
        self.array = np.array(array)
        self.dtype = str(array.dtype)
        self.shape = array.shape

    def numpy(self):
        return self.array.copy()


class Record(dict):
    """A stand-in for a Flower ArrayRecord, a mapping of Arrays."""


def state(arrays, make, seed):
    """A state dict whose last tensor is outside the rows."""
    named = OrderedDict(
        (f"layer{i}.weight", make(a.copy())) for i, a in enumerate(arrays)
    )
    named["steps"] = make(np.asarray(seed))
    return named


def flat(arrays):
    return np.concatenate(
        [x.reshape(-1) for x in arrays] + [np.ones(1, arrays[0].dtype)]
    )


FORMS = {
    "row": lambda a, s: torch.from_numpy(flat(a)),
    "array": lambda a, s: flat(a),
    "arrays": lambda a, s: [*a, np.full((2, 2), s)],
    "scalars": lambda a, s: [a[0].dtype.type(s), *a],
    "tensors": lambda a, s: tuple(torch.from_numpy(x.copy()) for x in a),
    "state": lambda a, s: state(a, torch.from_numpy, s),
    "numpy state": lambda a, s: dict(state(a, np.asarray, s)),
    "record": lambda a, s: Record(state(a, Array, s)),
}
OUTER = {
    "list": lambda models: models,
    "dict": lambda models: {f"client {i}": m for i, m in enumerate(models)},
}


def same(a, b):
    assert type(a) is type(b)
    if isinstance(a, dict):
        same(list(a.items()), list(b.items()))
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    elif isinstance(a, Array):
        same(a.array, b.array)
    elif isinstance(a, torch.Tensor | np.ndarray):
        assert a.dtype == b.dtype and a.shape == b.shape and (a == b).all()
    else:
        assert a == b


@pytest.mark.parametrize("form", FORMS)
@given(outer=st.sampled_from(sorted(OUTER)), shapes=SHAPES, dtype=DTYPES)
def test_what_is_packed_comes_back(form, outer, shapes, dtype):
    def models():
        draw = np.random.default_rng(0)
        arrays = [
            [np.asarray(draw.normal(size=s)).astype(dtype) for s in shapes]
            for _ in range(3)
        ]
        return OUTER[outer]([FORMS[form](a, i) for i, a in enumerate(arrays)])

    uploads = models()
    twin = models()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows, packed = pack(uploads)
    assert rows.shape[0] == 3 and str(rows.dtype) == f"torch.{dtype}"
    back = unpack(rows, packed)
    same(back, uploads)
    rows.zero_()
    same(uploads, twin)  # the rows are not a view of the uploads
    same(back, twin)  # the models are not a view of the rows


def test_a_matrix_is_taken_as_it_is():
    tensor = torch.arange(12.0).reshape(4, 3)
    for matrix in (tensor, tensor.numpy()):
        rows, form = pack(matrix)
        assert rows.data_ptr() == tensor.data_ptr()
        same(unpack(rows, form), matrix)
    for kind in ("f8", ">f4"):
        reversed_matrix = tensor.numpy().astype(kind)[::-1, ::-1]
        same(unpack(*pack(reversed_matrix)), reversed_matrix.astype(kind[-2:]))


def net(seed=0, wide=3):
    torch.manual_seed(seed)
    body = layers(f"Linear 4 {wide}, BatchNorm1d {wide}, Linear {wide} 2")
    body[1].running_mean.normal_()
    body[1].num_batches_tracked.fill_(seed)
    return body


def test_modules_come_back_as_modules_of_their_own():
    models = [net(0), net(1)]
    models[0][0].weight.requires_grad_(False)
    rows, form = pack(models)
    assert list(form.columns) == [
        f"{i}.{kind}" for i in range(3) for kind in ("weight", "bias")
    ]
    back = unpack(rows.flip(0), form)
    for i in (0, 1):
        before = models[i].state_dict()
        other = models[1 - i].state_dict()
        for key, value in back[i].state_dict().items():
            is_statistic = "running" in key or "num_batches" in key
            assert torch.equal(value, (before if is_statistic else other)[key]), key
            assert value.data_ptr() != before[key].data_ptr()
    assert not back[0][0].weight.requires_grad and back[1][0].weight.requires_grad


@pytest.mark.parametrize("form", [lambda m: m, nn.Module.state_dict])
def test_running_statistics_are_mixed_like_the_models_or_left_alone(form):
    uploads = [form(net(i)) for i in range(3)]

    def statistics(models):
        states = [m if isinstance(m, dict) else m.state_dict() for m in models]
        return torch.stack([s["1.running_mean"] for s in states])

    local = pack(uploads)
    assert torch.equal(statistics(unpack(*local)), statistics(uploads))
    rows, packed = pack(uploads, batch_norm="average")
    assert torch.equal(rows, local.rows)  # statistics are not a part of the rows
    means = statistics(uploads).mean(0).expand(3, -1)
    assert_close(statistics(unpack(rows, packed)), means)
    weight = torch.tensor([[0.0, 0.5, 0.5], [1, 0, 0], [0, 0, 1]], dtype=torch.float64)
    mixed = statistics(unpack(rows, packed, weight))
    assert_close(mixed, weight.float() @ statistics(uploads))
    with sentence("weight: expected a row for each of 3 clients, got"):
        unpack(rows, packed, weight[:2])
    with sentence(
        rf"rows: expected \[3, {rows.shape[1]}\], a row for each client that was packed"
    ):
        unpack(rows[:1], packed)


def test_patterns_choose_and_private_tensors_may_differ():
    states = [net(0, 3).state_dict(), net(1, 3).state_dict()]
    states[1] |= {"2.weight": torch.ones(7, 3), "extra": torch.ones(1)}
    rows, form = pack(states, exclude=["2.*", "extra"])
    assert list(form.columns) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    back = unpack(torch.zeros_like(rows), form)
    assert (
        torch.equal(back[1]["2.weight"], torch.ones(7, 3))
        and not back[1]["0.weight"].any()
    )
    form = pack(states, include="0.*").form
    assert list(form.columns) == ["0.weight", "0.bias"]
    form = pack(states, include="0.*", exclude="*.bias").form
    assert list(form.columns) == ["0.weight"]
    with sentence(
        "include, exclude: expected patterns of some of 0.weight, .*, got 'v'"
    ):
        pack(states, include="v")


def test_lazy_values_are_asked_for_one_client_at_a_time():
    log = []

    class Logged:
        def __init__(self, client, name):
            self.at = client, name

        def materialize(self):
            log.append(self.at)
            return np.full(3, self.at[0], np.float32)

    rows, form = pack([{k: Logged(i, k) for k in "ab"} for i in range(3)], include="a")
    assert log == [(0, "a"), (1, "a"), (2, "a")] and rows.tolist() == [
        [i] * 3 for i in range(3)
    ]
    back = unpack(rows, form)[1]
    assert (
        isinstance(back["a"], np.ndarray)
        and isinstance(back["b"], Logged)
        and len(log) == 3
    )


def test_a_list_may_hold_lazy_values():
    class Lazy:
        def materialize(self):
            return np.arange(3, dtype=np.float32)

    rows, _ = pack([[Lazy(), np.ones(2, np.float32)]] * 2)
    assert rows.tolist() == [[0, 1, 2, 1, 1]] * 2


def test_bfloat16_and_foreign_memory():
    uploads = [{"w": torch.randn(3, 4).bfloat16().T} for _ in range(2)]
    rows, form = pack(uploads)
    assert rows.dtype == torch.bfloat16
    same(unpack(rows, form), uploads)
    fortran = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    big_endian = np.arange(2.0).astype(">f8")
    odd = [[fortran, np.arange(4.0)[::-1], big_endian]] * 2
    rows, form = pack(odd)
    assert rows[0].tolist() == [0, 1, 2, 3, 4, 5, 3, 2, 1, 0, 0, 1]
    same(unpack(rows, form), odd)


def test_flowers_own_records():
    app = pytest.importorskip("flwr.app")
    records = [app.ArrayRecord(net(i).state_dict()) for i in range(2)]
    rows, form = pack(records)
    assert_close(rows, pack([net(0), net(1)]).rows)
    back = unpack(rows, form)
    assert back == records and isinstance(back[0], app.ArrayRecord)
    with sentence("client 0: 'w': expected a whole array .* as float32"):
        pack([app.ArrayRecord({"w": app.Array(np.zeros(4, "V2"))})])


# Each line: the dtypes and shapes of tensors of ones, and the error. LIKE stands for
# the words of the error that compare a client with the first one.
BAD = """\
[["float 2", "float 2"], ["float 2"]] | client 1: '1': expected .2. torch.float32.* LIKE none
[{"w": "float 2"}, {"w": "float 2", "c": "float 2"}] | client 1: 'c': expected none, LIKE .2.
{"x": {"w": "float 2"}, "y": {"w": "half 2"}} | client 'y': 'w': .* LIKE .2. torch.float16 on
[{"w": "float 2", "b": "double 2"}] | client 0: 'b': .* LIKE .2. torch.float64 on cpu
[{"w": "cfloat 2"}] | uploads: expected floating-point tensors to be packed
["float 2", "float 3"] | client 1: 'row': expected .2. .* LIKE .3.
[{"n": "long 2"}] | uploads: expected floating-point tensors to be packed, got .'n'.
[] | uploads: expected the models of at least one client
{"w": "float 2", "b": "float 3 2"} | client 'b': expected a 1-D tensor
"long 1 2" | uploads: expected floating-point rows
["float 2 2"] | client 0: expected a 1-D tensor, .* got a tensor .2, 2.
"""  # noqa: E501


def ones(words):
    dtype, *shape = words.split()
    return torch.ones([*map(int, shape)], dtype=getattr(torch, dtype))


@pytest.mark.parametrize("uploads, words", tabled(BAD))
def test_bad_uploads_are_one_sentence(uploads, words):
    with sentence(words.replace("LIKE", "as of the first client, got")):
        pack(tree_map(ones, uploads))


OTHERS = [
    (
        [net(0), net(0, 5)],
        "client 1: '0.weight': expected .3, 4. .* client, got .5, 4.",
    ),
    (
        [{"w": torch.ones(2).to_sparse()}],
        "client 0: 'w': expected a dense tensor with values",
    ),
    ([nn.LazyLinear(3)], "client 0: 'weight': expected a dense tensor with values"),
    (
        [[np.array(["a"])]],
        "client 0: '0': expected a whole array in a dtype .* got <U1",
    ),
    (layers("Linear 2 2"), "uploads: expected rows"),
    *(
        (
            [(client, model)] * 2,
            "client 0, element 0: expected a tensor or an array; models by cl",
        )
        for client in ("a", 0)
        for model in (torch.ones(3), np.ones(3), [np.ones(3)], {"w": torch.ones(3)})
    ),
    ({"a": [np.ones(2), None]}, "client 'a', element 1: expected a tensor or an array"),
    ([[[1.0, 2.0]]], "client 0, element 0: expected a tensor or an array"),
]


@pytest.mark.parametrize("uploads, words", OTHERS)
def test_what_holds_no_rows_is_one_sentence(uploads, words):
    with sentence(words):
        pack(uploads)
