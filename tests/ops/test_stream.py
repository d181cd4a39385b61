"""Rows in files give the same bits as rows in memory."""

import numpy as np
import pytest
import torch
from laws import identical, integers
from tolerance import F16, F32, F64
from ugly import randn, refuses

import pflcore
from pflcore import aggregate, pairwise_sqdist
from pflcore.ops import nearest, stream

KERNELS = pflcore.backend().kernels


def mapped(t, folder, name="rows", mode="r"):
    """The same rows as a map of a file."""
    path = folder / f"{name}.npy"
    np.save(path, t.numpy())
    return np.load(path, mmap_mode=mode)


def same(got, want):
    """Asserts equal bits, or equality up to rounding on the references.

    The references sum all rows in one product, and torch chooses the order of its sums.
    """
    assert got.dtype == want.dtype and got.shape == want.shape
    atol = 32 * torch.finfo(want.dtype).eps * float(want.abs().max())
    assert (
        torch.equal(got, want)
        if KERNELS
        else torch.allclose(got, want, rtol=0, atol=atol)
    )


@pytest.fixture
def few_bytes(monkeypatch):
    """Makes blocks hold five rows of 67 float32 numbers."""
    monkeypatch.setattr(stream, "BLOCK_BYTES", 5 * 67 * 4)


@pytest.mark.usefixtures("few_bytes")
@pytest.mark.parametrize("dtype", [F32, F64, F16])
def test_distances(tmp_path, recwarn, dtype):
    """Distances of mapped rows have the bits of rows in memory.

    A read-only map is not written, and reading it does not warn.
    """
    a = randn(1, 23, 67, dtype=dtype)
    b = randn(2, 11, 67, dtype=dtype)
    files = mapped(a, tmp_path), mapped(b, tmp_path, "b")
    got = stream.pairwise_sqdist(*files)
    assert torch.equal(got, pairwise_sqdist(a, b))
    assert torch.equal(stream.pairwise_sqdist(files[0]), pairwise_sqdist(a))
    assert stream.pairwise_sqdist(a[:0], b).shape == (0, 11)
    assert not recwarn.list
    with refuses("pairwise_sqdist", "b"):
        stream.pairwise_sqdist(files[0], b[:, 1:])


@pytest.mark.usefixtures("few_bytes")
@pytest.mark.parametrize("n", [3, 128, 129, 300])
@pytest.mark.parametrize(
    "dtype, precise", [(F32, False), (F32, True), (F16, False), (F64, False)]
)
def test_dense_mixtures(tmp_path, n, dtype, precise):
    rows = randn(1, n, 67, dtype=dtype)
    weight = randn(4, 3, n).abs()
    for base in (None, randn(2, 67, dtype=F32), randn(3, 3, 67, dtype=dtype)):
        options = {"base": base, "lr": 0.7, "precise": precise}
        want = aggregate(rows, weight, **options)
        same(stream.aggregate(mapped(rows, tmp_path), weight, **options), want)


@pytest.mark.usefixtures("few_bytes")
def test_mixtures_by_index(tmp_path):
    """Mixtures by index of mapped rows have the same bits.

    Rows with weight 0 are not read. A weight counts also where its product with lr is
    too small for the weight's own dtype.
    """
    rows = randn(1, 40, 67, dtype=F32)
    index = integers(0, 0, 40, 9, 4)
    weight = randn(4, 9, 4).abs()
    weight[2] = 0
    weight[4, 2] = -0.7
    weight[:, 1] = 0
    rows[index[3, 1]] = torch.nan
    file = mapped(rows, tmp_path)
    for base in (None, randn(2, 67, dtype=F32), randn(3, 9, 67, dtype=F64)):
        got = stream.aggregate(file, weight, index, base, 0.5)
        identical(got, aggregate(rows, weight, index, base, 0.5))
    out = np.lib.format.open_memmap(tmp_path / "out.npy", "w+", np.float32, (9, 67))
    assert stream.aggregate(file, weight, index, out=out) is out
    written = torch.from_numpy(np.load(tmp_path / "out.npy"))
    identical(written, aggregate(rows, weight, index))
    rows = randn(1, 4, 67, dtype=F32)
    small = torch.tensor([[3e-3, 1.0]], dtype=F16)
    index = torch.tensor([[2, 1]])
    got = stream.aggregate(rows, small, index, lr=5e-6)
    assert torch.equal(got, aggregate(rows, small, index, lr=5e-6))


def test_models_in_safetensors_files(tmp_path):
    save_file = pytest.importorskip("safetensors.torch").save_file

    def saved(name, model):
        save_file(model, tmp_path / f"{name}.safetensors")
        return tmp_path / f"{name}.safetensors"

    rows = randn(0, 6, 10, dtype=F32)
    paths = [
        saved(i, {"b": row[6:], "a.w": row[:6].view(3, 2), "steps": torch.tensor(i)})
        for i, row in enumerate(rows)
    ]
    files = stream.Files(paths)
    weight = torch.full((1, 6), 1 / 6)
    assert files.keys == ["a.w", "b"] and files.shape == (6, 10)
    assert torch.equal(files[1:4], rows[1:4]) and files[2:2].shape == (0, 10)
    assert torch.equal(stream.pairwise_sqdist(files), pairwise_sqdist(rows))
    assert torch.equal(nearest(files, files, 2).index, nearest(rows, rows, 2).index)
    same(stream.aggregate(files, weight), aggregate(rows, weight))
    assert torch.equal(stream.Files(paths, ["b"])[0:6], rows[:, 6:])
    for keys in (["c"], ["b", "steps"]):
        with refuses("Files", "keys"):
            stream.Files(paths, keys)
    turned = saved("turned", {"a.w": torch.zeros(2, 3), "b": torch.zeros(4)})
    for bad in ([], [*paths, turned]):
        with refuses("Files", "paths"):
            stream.Files(bad)[0:7]
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"no")
    for bad in ([broken], [tmp_path / "absent.safetensors"], [paths[0], broken]):
        with pytest.raises(ValueError, match="expected whole safetensors files, got "):
            stream.Files(bad)[0:2]


ROWS = randn(1, 5, 7, dtype=F32)
WEIGHT = torch.ones(1, 5)


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("weight", (np.zeros((4, 7), np.float32), WEIGHT)),
        ("index", (ROWS, WEIGHT, torch.full((1, 5), 5))),
        # Many rows: more than one block.
        ("base", (randn(1, 200, 5), torch.ones(2, 200), None, torch.ones(4))),
        ("base", (randn(1, 200, 5), torch.ones(2, 200), None, torch.ones(1, 5))),
    ],
)
def test_bad_input(name, arguments):
    with refuses("aggregate", name):
        stream.aggregate(*arguments)


def test_rows_of_any_memory():
    x = randn(1, 150, 7, dtype=F32).numpy()
    turned = [x[::-1], x[:, ::-1], x[::2][:, ::3].astype(">f4"), x.astype(">f4")]
    for rows in (*turned, np.asfortranarray(x)):
        weight = randn(2, 2, len(rows))
        plain = torch.from_numpy(rows.astype("f4").copy(order="C"))
        torch.testing.assert_close(
            stream.aggregate(rows, weight), stream.aggregate(plain, weight)
        )
        torch.testing.assert_close(
            stream.pairwise_sqdist(rows), stream.pairwise_sqdist(plain)
        )


# --- the memory of a result -------------------------------------------------


def test_a_result_that_does_not_fit_is_refused_and_nothing_is_written():
    rows = randn(1, 200, 7, dtype=F32)
    index = integers(0, 0, 200, 200, 3)
    before = rows.clone()
    whole = torch.ones(200, 200)
    for out in (
        np.zeros((3, 7), np.float32),
        np.zeros((200, 7), np.int64),
        [1.0],
        rows,
    ):
        with refuses("aggregate", "out"):
            stream.aggregate(rows, whole[:, :3], index, out=out)
        if out is not rows:
            with refuses("aggregate", "out"):
                stream.aggregate(rows.numpy(), whole, out=out)
    assert torch.equal(rows, before)


INDEX = torch.stack([(torch.arange(6) + i) % 6 for i in (1, 2)], 1)
HALF = torch.full((6, 2), 0.5)


@pytest.fixture
def models(tmp_path):
    return mapped(randn(0, 12, 5, dtype=F32), tmp_path, mode="r+")


SAME = {
    "itself": lambda m: m[:6],
    "a tensor": lambda m: torch.from_numpy(m)[:6],
    "rows backwards": lambda m: m[:6][::-1],
    "one row of it": lambda m: m[5:11],
}


@pytest.mark.parametrize("updates", SAME)
@pytest.mark.parametrize("out", [n for n in SAME if n != "rows backwards"])
@pytest.mark.unless(lambda updates, out: (updates == "a tensor") != (out == "a tensor"))
def test_a_result_in_the_memory_of_the_updates_is_refused(models, updates, out):
    rows = SAME[updates](models)
    target = SAME[out](models)
    with pytest.raises(
        ValueError, match=r"^aggregate\(out\): expected memory of its own, .* updates"
    ):
        stream.aggregate(rows, HALF, INDEX, out=target)


def test_the_base_may_be_the_result_and_other_rows_are_memory_of_their_own(models):
    updates = randn(1, 6, 5, dtype=F32)
    out = models[:6]
    base = torch.from_numpy(out)
    want = aggregate(updates, HALF, INDEX, base.clone())
    stream.aggregate(updates, HALF, INDEX, base=base, out=out)
    assert torch.equal(base, want)
    got = stream.aggregate(models[:6], HALF, INDEX, out=models[6:])
    assert torch.equal(torch.from_numpy(got), aggregate(base, HALF, INDEX))
