"""Rows from files, maps and blocks: what comes out has the bits of the same ops in memory."""

import numpy as np
import pytest
import torch
from tolerance import F16, F32, F64
from ugly import randn, refuses

import pflcore
from pflcore import aggregate, pairwise_sqdist
from pflcore.ops import nearest, stream

KERNELS = pflcore.backend().kernels


def mapped(t, folder, name="rows", mode="r"):
    """The same rows in a file."""
    path = folder / f"{name}.npy"
    np.save(path, t.numpy())
    return np.load(path, mmap_mode=mode)


def same(got, want):
    """To the last bit; the references sum all rows in one product, whose order torch chooses: to
    the rounding of so long a sum."""
    assert got.dtype == want.dtype and got.shape == want.shape
    atol = 32 * torch.finfo(want.dtype).eps * float(want.abs().max())
    assert torch.equal(got, want) if KERNELS else torch.allclose(got, want, rtol=0, atol=atol)


@pytest.fixture
def few_bytes(monkeypatch):
    """Blocks of five rows of 67 float32 numbers."""
    monkeypatch.setattr(stream, "BYTES", 5 * 67 * 4)


@pytest.mark.usefixtures("few_bytes")
@pytest.mark.parametrize("dtype", [F32, F64, F16])
def test_distances(tmp_path, dtype):
    a, b = randn(1, 23, 67, dtype=dtype), randn(2, 11, 67, dtype=dtype)
    seen: list[tuple[int, int]] = []
    files = mapped(a, tmp_path), mapped(b, tmp_path, "b")
    assert torch.equal(
        stream.pairwise_sqdist(*files, progress=lambda *at: seen.append(at)), pairwise_sqdist(a, b)
    )
    assert seen[-1] == (23, 23) and len(seen) > 2
    assert torch.equal(stream.pairwise_sqdist(files[0]), pairwise_sqdist(a))
    assert stream.pairwise_sqdist(a[:0], b).shape == (0, 11)


@pytest.mark.usefixtures("few_bytes")
@pytest.mark.parametrize("method", ["exact", "groups"])
def test_nearest(tmp_path, method):
    centre = randn(1, 4, 67)
    rows = (centre.repeat(10, 1) + 1e-3 * randn(2, 40, 67)).float()
    rows[7] = torch.nan
    guide = (rows[:33].nan_to_num() + 1e-3 * randn(3, 33, 67)).float()
    want = nearest(guide, rows, 6, method)
    got = nearest(mapped(guide, tmp_path, "guide"), mapped(rows, tmp_path), 6, method)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


@pytest.mark.usefixtures("few_bytes")
@pytest.mark.parametrize("n", [3, 128, 129, 300])
@pytest.mark.parametrize(
    ("dtype", "precise"), [(F32, False), (F32, True), (F16, False), (F64, False)]
)
def test_dense_mixtures(tmp_path, n, dtype, precise):
    rows, weight = (
        randn(1, n, 67, dtype=dtype),
        torch.rand(3, n, generator=torch.Generator().manual_seed(0)).double(),
    )
    for base in (None, randn(2, 67, dtype=F32), randn(3, 3, 67, dtype=dtype)):
        want = aggregate(rows, weight, base=base, lr=0.7, precise=precise)
        same(
            stream.aggregate(mapped(rows, tmp_path), weight, base=base, lr=0.7, precise=precise),
            want,
        )
        for cut in (1, 50, 1000):
            seen: list[tuple[int, int]] = []
            got = stream.aggregate(
                iter(rows.split(cut)),
                weight,
                base=base,
                lr=0.7,
                precise=precise,
                progress=lambda *at, seen=seen: seen.append(at),
            )
            same(got, want)
            assert seen[-1] == (n, n)


@pytest.mark.usefixtures("few_bytes")
def test_mixtures_by_index(tmp_path):
    rows = randn(1, 40, 67, dtype=F32)
    gen = torch.Generator().manual_seed(0)
    index, weight = (
        torch.randint(0, 40, (9, 4), generator=gen),
        torch.rand(9, 4, generator=gen).double(),
    )
    weight[2], weight[4, 2] = 0, -0.7
    weight[:, 1] = 0
    rows[index[3, 1]] = torch.nan  # of weight 0 there
    for base in (None, randn(2, 67, dtype=F32), randn(3, 9, 67, dtype=F64)):
        want = aggregate(rows, weight, index, base, 0.5)
        got = stream.aggregate(mapped(rows, tmp_path), weight, index, base, 0.5)
        assert got.dtype == want.dtype and torch.equal(got.nan_to_num(), want.nan_to_num())
    out = np.lib.format.open_memmap(tmp_path / "out.npy", "w+", np.float32, (9, 67))
    assert stream.aggregate(mapped(rows, tmp_path), weight, index, out=out) is out
    assert torch.equal(
        torch.from_numpy(np.load(tmp_path / "out.npy")).nan_to_num(),
        aggregate(rows, weight, index).nan_to_num(),
    )


def test_a_map_opened_for_reading_is_not_written_and_warns_of_nothing(tmp_path, recwarn):
    rows = randn(1, 5, 7, dtype=F32)
    stream.pairwise_sqdist(mapped(rows, tmp_path))
    assert not recwarn.list


def test_models_in_safetensors_files(tmp_path):
    save_file = pytest.importorskip("safetensors.torch").save_file
    models = [
        {
            "b": randn(i, 4, dtype=F32),
            "a.w": randn(9 + i, 3, 2, dtype=F32),
            "steps": torch.tensor(i),
        }
        for i in range(6)
    ]
    for i, model in enumerate(models):
        save_file(model, tmp_path / f"{i}.safetensors")
    rows = torch.stack([torch.cat([m["a.w"].flatten(), m["b"]]) for m in models])
    paths = sorted(tmp_path.glob("*.safetensors"))
    files = stream.Files(paths)
    assert files.keys == ["a.w", "b"] and files.shape == (6, 10)
    assert torch.equal(files[1:4], rows[1:4]) and files[2:2].shape == (0, 10)
    assert torch.equal(stream.pairwise_sqdist(files), pairwise_sqdist(rows))
    assert torch.equal(nearest(files, files, 2).index, nearest(rows, rows, 2).index)
    same(
        stream.aggregate(files, torch.full((1, 6), 1 / 6)),
        aggregate(rows, torch.full((1, 6), 1 / 6)),
    )
    assert torch.equal(stream.Files(paths, ["b"])[0:6], rows[:, 6:])
    with refuses("Files", "keys"):
        stream.Files(paths, ["c"])
    with refuses("Files", "keys"):
        stream.Files(paths, ["b", "steps"])
    with refuses("Files", "paths"):
        stream.Files([])
    save_file({"a.w": torch.zeros(2), "b": torch.zeros(4)}, tmp_path / "6.safetensors")
    with refuses("Files", "paths"):
        stream.Files([*paths, tmp_path / "6.safetensors"])[0:7]


def test_bad_input(tmp_path):
    rows, weight = randn(1, 5, 7, dtype=F32), torch.ones(1, 5)
    for bad in (
        [rows[:2]],
        [rows, rows],
        [rows[:3], rows[3:, :2]],
        [rows[:3], rows[3:].double()],
        [],
        np.zeros((4, 7), np.float32),
    ):
        with refuses("aggregate", "updates" if not isinstance(bad, np.ndarray) else "weight"):
            stream.aggregate(bad, weight)
    with refuses("aggregate", "updates"):
        stream.aggregate([rows], weight, torch.zeros(1, 5, dtype=torch.int64))
    with refuses("aggregate", "index"):
        stream.aggregate(rows, weight, torch.full((1, 5), 5))
    with refuses("pairwise_sqdist", "a", TypeError):
        stream.pairwise_sqdist([[1.0]])
    with refuses("pairwise_sqdist", "b"):
        stream.pairwise_sqdist(rows.numpy(), np.zeros((2, 3), np.float32))


def test_a_bar_shows_how_far_it_is(capsys, tmp_path):
    pytest.importorskip("tqdm")
    rows = torch.randn(6, 5)
    for call in (
        lambda: stream.pairwise_sqdist(mapped(rows, tmp_path), progress=True),
        lambda: stream.aggregate(iter(rows.split(2)), torch.ones(2, 6), progress=True),
        lambda: nearest(rows, rows, 2, progress=True),
    ):
        call()
        assert "6/6" in capsys.readouterr().err


def test_a_result_that_does_not_fit_is_refused_and_nothing_is_written():
    rows, weight = randn(1, 200, 7, dtype=F32), torch.ones(200, 3)
    index = torch.arange(600).view(200, 3) % 200
    before = rows.clone()
    bad = [
        torch.zeros(3, 7),
        torch.zeros(200, 7, dtype=torch.int64),
        np.zeros((3, 7), np.float32),
        np.zeros((200, 7), np.int64),
        [1.0],
    ]
    for out in [*bad, rows]:
        with refuses("aggregate", "out"):
            stream.aggregate(rows, weight, index, out=out)
    for out in bad:
        with refuses("aggregate", "out"):
            stream.aggregate([rows[:50], rows[50:]], torch.ones(200, 200), out=out)
        with refuses("aggregate", "out"):
            stream.aggregate(rows.numpy(), torch.ones(200, 200), out=out)
    assert torch.equal(rows, before)


def test_rows_of_any_memory():
    x = randn(1, 150, 7, dtype=F32).numpy()
    weight = torch.rand(2, 150)
    for rows in (
        x[::-1],
        x[:, ::-1],
        x[::2][:, ::3].astype(">f4"),
        x.astype(">f4"),
        np.asfortranarray(x),
    ):
        w = weight[:, : len(rows)]
        plain = torch.from_numpy(rows.astype("f4").copy(order="C"))
        torch.testing.assert_close(stream.aggregate(rows, w), stream.aggregate(plain, w))
        torch.testing.assert_close(stream.aggregate([rows], w), stream.aggregate(plain, w))
        torch.testing.assert_close(stream.pairwise_sqdist(rows), stream.pairwise_sqdist(plain))


def test_a_weight_that_is_small_in_its_own_dtype_counts():
    rows, weight = randn(1, 4, 7, dtype=F32), torch.tensor([[3e-3, 1.0]], dtype=torch.float16)
    index = torch.tensor([[2, 1]])
    assert torch.equal(
        stream.aggregate(rows, weight, index, lr=5e-6), aggregate(rows, weight, index, lr=5e-6)
    )


def test_files_of_other_shapes_or_no_files_are_refused(tmp_path):
    save_file = pytest.importorskip("safetensors.torch").save_file
    for i, shape in enumerate([(2, 3), (3, 2)]):
        save_file({"a": torch.zeros(shape)}, tmp_path / f"{i}.safetensors")
    paths = sorted(tmp_path.glob("*.safetensors"))
    with refuses("Files", "paths"):
        stream.Files(paths)[0:2]
    assert stream.Files(paths[:1], "a").keys == ["a"]
    (tmp_path / "2.safetensors").write_bytes(b"no")
    for bad in (
        [tmp_path / "2.safetensors"],
        [tmp_path / "absent.safetensors"],
        [paths[0], tmp_path / "2.safetensors"],
    ):
        with pytest.raises(ValueError, match="is no whole safetensors file"):
            stream.Files(bad)[0:2]


def test_a_result_in_the_memory_of_its_rows_is_refused(tmp_path):
    rows = mapped(randn(1, 20, 7, dtype=F32), tmp_path, mode="r+")
    index = torch.arange(20).flip(0)[:, None]
    for out in (rows, rows[:]):
        with refuses("aggregate", "out"):
            stream.aggregate(rows, torch.ones(20, 1), index, out=out)
    out = stream.aggregate(rows, torch.ones(20, 1), index, out=np.zeros((20, 7), np.float32))
    assert np.array_equal(out, rows[::-1])


@pytest.mark.parametrize(
    "base", [torch.zeros(5, dtype=torch.int64), torch.ones(4), torch.ones(1, 5)]
)
def test_a_base_is_checked_for_many_rows_too(base):
    with refuses("aggregate", "base", ValueError if base.is_floating_point() else TypeError):
        stream.aggregate(randn(1, 200, 5, dtype=F32), torch.ones(2, 200), base=base)


def test_no_blocks_at_all():
    with refuses("aggregate", "updates"):
        stream.aggregate(iter([]), torch.ones(1, 0))
