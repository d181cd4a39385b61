"""Every form of clients' models becomes rows and comes back; what does not fit is one sentence."""

import io
import warnings
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pflcore import pack, unpack

SHAPES = st.lists(st.lists(st.integers(0, 3), max_size=3).map(tuple), min_size=1, max_size=4)
FLOAT = {"f16": "float16", "f32": "float32", "f64": "float64"}


@dataclass
class Array:
    """What a Flower Array is made of."""

    dtype: str
    shape: tuple[int, ...]
    stype: str
    data: bytes


class Record(dict):
    """A Flower ArrayRecord is a mapping of Arrays."""


def flower(array):
    data = io.BytesIO()
    np.save(data, array)
    return Array(str(array.dtype), array.shape, "numpy.ndarray", data.getvalue())


def values(shapes, dtype, seed):
    draw = np.random.default_rng(seed)
    return [np.asarray(draw.normal(size=s)).astype(dtype) for s in shapes]


def state(arrays, torch_, seed):
    named = OrderedDict(
        (f"layer{i}.weight", torch.from_numpy(a.copy()) if torch_ else a)
        for i, a in enumerate(arrays)
    )
    named["steps"] = torch.tensor(seed) if torch_ else np.int64(seed)
    return named


FORMS: dict[str, Any] = {
    "row": lambda a, s: torch.from_numpy(
        np.concatenate([x.reshape(-1) for x in a] + [np.ones(1, a[0].dtype)])
    ),
    "array": lambda a, s: np.concatenate([x.reshape(-1) for x in a] + [np.ones(1, a[0].dtype)]),
    "arrays": lambda a, s: [*a, np.full((2, 2), s)],
    "tensors": lambda a, s: tuple(torch.from_numpy(x.copy()) for x in a),
    "state": lambda a, s: state(a, True, s),
    "numpy state": lambda a, s: dict(state(a, False, s)),
    "record": lambda a, s: Record(
        {k: flower(np.asarray(v)) for k, v in state(a, False, s).items()}
    ),
}
OUTER: dict[str, Any] = {
    "list": lambda models: models,
    "dict": lambda models: {f"client {i}": m for i, m in enumerate(models)},
    "pairs": lambda models: list(enumerate(models, 7)),
}


def same(a, b):
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert list(a) == list(b)
        for k in a:
            same(a[k], b[k])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b)
    else:
        assert a == b


@given(
    st.sampled_from(sorted(FORMS)),
    st.sampled_from(sorted(OUTER)),
    SHAPES,
    st.sampled_from(sorted(FLOAT)),
    st.integers(1, 4),
)
def test_what_is_packed_comes_back(form, outer, shapes, dtype, n):
    make, wrap = FORMS[form], OUTER[outer]
    given, twin = (
        wrap([make(values(shapes, FLOAT[dtype], i), i) for i in range(n)]) for _ in range(2)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows, packed = pack(given)
    assert rows.shape[0] == n and str(rows.dtype) == f"torch.{FLOAT[dtype]}"
    back = unpack(rows, packed)
    same(back, given)
    rows.zero_()
    same(given, twin)  # the rows are no view of what came
    same(back, twin)  # nor is what goes back a view of the rows


@pytest.mark.parametrize("array", [False, True])
def test_a_matrix_is_taken_as_it_is(array):
    given: Any = np.arange(6.0).reshape(2, 3) if array else torch.arange(6.0).reshape(2, 3)
    rows, form = pack(given)
    assert rows.data_ptr() == (given.ctypes.data if array else given.data_ptr())
    same(unpack(rows, form), given)


def net(seed=0, wide=3):
    torch.manual_seed(seed)
    body = nn.Sequential(nn.Linear(4, wide), nn.BatchNorm1d(wide), nn.Linear(wide, 2))
    body[1].running_mean.normal_()
    body[1].num_batches_tracked.fill_(seed)
    return body


def test_modules_come_back_as_modules_of_their_own():
    given = [net(0), net(1)]
    given[0][0].weight.requires_grad_(False)
    rows, form = pack(given)
    assert list(form.columns) == ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"]
    back = unpack(rows.flip(0), form)
    for i in (0, 1):
        mine, others = given[i].state_dict(), given[1 - i].state_dict()
        for key, value in back[i].state_dict().items():
            own = "running" in key or "num_batches" in key
            assert torch.equal(value, (mine if own else others)[key]), key
            assert value.data_ptr() != mine[key].data_ptr()
    assert not back[0][0].weight.requires_grad and back[1][0].weight.requires_grad


@pytest.mark.parametrize("form", ["module", "state"])
def test_running_statistics_are_mixed_like_the_models_or_left_alone(form):
    given: list[Any] = [net(0), net(1), net(2)]
    given = given if form == "module" else [m.state_dict() for m in given]

    def statistics(models):
        return torch.stack(
            [(m.state_dict() if form == "module" else m)["1.running_mean"] for m in models]
        )

    local = pack(given)
    assert torch.equal(statistics(unpack(*local)), statistics(given))
    rows, packed = pack(given, buffers="average")
    assert torch.equal(rows, local.rows)  # statistics are no part of a distance
    torch.testing.assert_close(
        statistics(unpack(rows, packed)), statistics(given).mean(0).expand(3, -1)
    )
    weight = torch.tensor([[0.0, 0.5, 0.5], [1, 0, 0], [0, 0, 1]], dtype=torch.float64)
    torch.testing.assert_close(
        statistics(unpack(rows, packed, weight)), weight.float() @ statistics(given)
    )


def test_patterns_choose_and_private_tensors_may_differ():
    given = [net(0, 3).state_dict(), net(1, 3).state_dict()]
    given[1]["2.weight"] = torch.ones(7, 3)
    given[1]["extra"] = torch.ones(1)
    rows, form = pack(given, exclude=["2.*", "extra"])
    assert list(form.columns) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    back = unpack(torch.zeros_like(rows), form)
    assert (
        torch.equal(back[1]["2.weight"], torch.ones(7, 3))
        and float(back[1]["0.weight"].abs().max()) == 0
    )
    assert list(pack(given, include="0.*").form.columns) == ["0.weight", "0.bias"]
    assert list(pack(given, include="0.*", exclude="*.bias").form.columns) == ["0.weight"]


def test_lazy_values_are_asked_for_one_client_at_a_time():
    log: list[tuple[int, str]] = []

    class Logged:
        def __init__(self, client, name):
            self.at = client, name

        def materialize(self):
            log.append(self.at)
            return np.full(3, self.at[0], np.float32)

    rows, form = pack([{k: Logged(i, k) for k in ("a", "b")} for i in range(3)], include="a")
    assert log == [(0, "a"), (1, "a"), (2, "a")] and rows.tolist() == [[i] * 3 for i in range(3)]
    back = unpack(rows, form)
    assert (
        isinstance(back[1]["a"], np.ndarray) and isinstance(back[1]["b"], Logged) and len(log) == 3
    )


def test_bfloat16_and_foreign_memory():
    given = [{"w": torch.randn(3, 4).bfloat16().T} for _ in range(2)]
    rows, form = pack(given)
    assert rows.dtype == torch.bfloat16
    same(unpack(rows, form), given)
    odd = [
        [
            np.asfortranarray(np.arange(6.0).reshape(2, 3)),
            np.arange(4.0)[::-1],
            np.arange(2.0).astype(">f8"),
        ]
        for _ in range(2)
    ]
    rows, form = pack(odd)
    assert rows[0].tolist() == [0, 1, 2, 3, 4, 5, 3, 2, 1, 0, 0, 1]
    same(unpack(rows, form), odd)
    records = [Record(w=flower(np.asfortranarray(np.arange(6.0).reshape(2, 3)))) for _ in range(2)]
    assert pack(records).rows[0].tolist() == [0, 1, 2, 3, 4, 5]


def test_files(tmp_path):
    save = pytest.importorskip("safetensors.torch").save_file
    models = [net(i).state_dict() for i in range(2)]
    paths = [tmp_path / f"{i}.safetensors" for i in range(2)]
    for path, model in zip(paths, models, strict=True):
        save(model, path)
    rows, form = pack({"a": paths[0], "b": str(paths[1])})
    back = unpack(rows, form)
    assert list(back) == ["a", "b"]
    for i, model in zip("ab", models, strict=True):
        same(dict(sorted(back[i].items())), dict(sorted(model.items())))
    paths[1].write_bytes(paths[1].read_bytes()[:-5])
    for bad in (paths[1], tmp_path / "none.safetensors"):
        with pytest.raises(ValueError, match=r"client 1: .* is no whole safetensors file") as error:
            pack([paths[0], bad])
        assert "\n" not in str(error.value)


def test_flowers_own_records():
    app = pytest.importorskip("flwr.app")
    given = [app.ArrayRecord({k: v for k, v in net(i).state_dict().items()}) for i in range(2)]
    rows, form = pack(given)
    back = unpack(rows, form)
    assert [type(b) for b in back] == [app.ArrayRecord] * 2
    for one, other in zip(given, back, strict=True):
        same(dict(one.to_torch_state_dict()), dict(other.to_torch_state_dict()))


W = torch.ones(2)
BAD: list[tuple[Any, dict[str, Any], str]] = [
    (
        [{"w": W, "b": W}, {"w": W}],
        {},
        "client 1: expected the tensors of client 0, got a model without 'b'",
    ),
    (
        [{"w": W}, {"w": W, "c": W}],
        {},
        "client 1: expected the tensors of client 0, got a model with 'c'",
    ),
    ([{"w": W}, {"w": torch.ones(3)}], {}, r"client 1: 'w' has shape \[3\], client 0's has \[2\]"),
    (
        {"x": {"w": W}, "y": {"w": W.half()}},
        {},
        "client 'y': 'w' is float16 on cpu where the row is float32",
    ),
    ([{"w": W, "b": W.double()}], {}, "client 0: 'b' is float64 on cpu where the row is float32"),
    (
        [{"w": W.to(torch.complex64)}],
        {},
        "client 0: 'w': expected float32, float64, float16 or bfloat16",
    ),
    ([("a", {"w": W}), ("a", {"w": W})], {}, "expected each client once, got 'a' more than once"),
    ([net(0), net(0, 5)], {}, "client 1: '0.weight' has shape"),
    ([W, torch.ones(3)], {}, r"client 1: its row has shape \[3\]"),
    ([{"n": torch.ones(2, dtype=torch.int64)}], {}, "client 0: found no floating-point tensor"),
    ([{"w": torch.ones(2).to_sparse()}], {}, "client 0: 'w': expected a dense tensor"),
    ([{"w": torch.ones(2, device="meta")}], {}, "client 0: 'w': expected a dense tensor"),
    ([nn.LazyLinear(3)], {}, "client 0: 'weight': expected a dense tensor with values"),
    (
        [Record(w=Array("float32", (2,), "numpy.ndarray", b"\x93NUMPY"))],
        {},
        "client 0: 'w': expected the bytes",
    ),
    (
        [Record(w=Array("float64", (2,), "numpy.ndarray", flower(np.ones(2)).data[:-3]))],
        {},
        "client 0: 'w': expected the bytes",
    ),
    ([[np.array(["a"])]], {}, "client 0: '0': numpy carries no <U1 to torch"),
    ([{"w": W}], {"include": "v*"}, r"'v\*' matches no tensor; the names are w"),
    ([{"w": W}], {"buffers": "mean"}, "buffers: expected 'local' or 'average'"),
    ([], {}, "expected the models of at least one client"),
    ({"w": W, "b": torch.ones(3)}, {}, "looks like one state dict"),
    (W.long()[None], {}, "expected floating-point rows"),
]


@pytest.mark.parametrize("uploads, options, words", BAD)
def test_bad_uploads_are_one_sentence(uploads, options, words):
    with pytest.raises(ValueError, match=words) as error:
        pack(uploads, **options)
    assert str(error.value).count(". ") == 0 and str(error.value).endswith(".")


@pytest.mark.parametrize(
    "uploads",
    [3, "model", W, nn.Sequential(nn.Linear(2, 2)), [object()], [torch.ones(2, 2)], [3.0]],
)
def test_what_is_no_model_is_one_sentence(uploads):
    with pytest.raises(TypeError, match=r"uploads: expected|client 0: expected") as error:
        pack(uploads)
    assert str(error.value).endswith(".")


def test_rows_that_are_not_those_that_were_packed():
    rows, form = pack([{"w": W}, {"w": W}])
    with pytest.raises(ValueError, match=r"rows: expected \[2, 2\]"):
        unpack(rows[:1], form)


def test_bfloat16_in_numpy_is_refused():
    ml = pytest.importorskip("ml_dtypes")
    with pytest.raises(ValueError, match="numpy carries no bfloat16"):
        pack([[np.ones(2, ml.bfloat16)]])


@pytest.mark.parametrize("kind", [">f4", ">f8", "f8"])
def test_matrices_of_any_memory(kind):
    x = np.arange(12.0).reshape(4, 3).astype(kind)
    for one in (x, x[::-1], x[:, ::-1]):
        assert pack(one)[0].tolist() == one.tolist()


def test_statistics_are_mixed_by_a_row_for_each_client():
    models = [nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).state_dict() for _ in range(3)]
    rows, form = pack(models, buffers="average")
    for bad in (torch.ones(2, 3), torch.ones(4, 3)):
        with pytest.raises(
            ValueError, match=r"weight: expected a row for each of 3 clients, got \[\d, 3\]"
        ):
            unpack(rows, form, weight=bad)
