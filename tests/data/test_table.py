"""Federations from one table of samples, and index lists as one flat tensor."""

import numpy as np
import pytest
import torch

from pflcore.data import Federation


def table(n=12, clients=4, seed=0):
    draw = np.random.default_rng(seed)
    ids = draw.permutation(np.arange(n) % clients)
    return draw.normal(size=(n, 3)).astype(np.float32), draw.integers(0, 2, n), ids


def test_a_client_holds_its_own_rows_in_their_order():
    x, y, ids = table()
    data = Federation.from_table(x, y, 10 * ids + 7)
    assert data.n == 4 and data.names == (7, 17, 27, 37)
    for i in range(4):
        mine = data.client(i)
        assert np.array_equal(mine[0], x[ids == i]) and np.array_equal(mine[1], y[ids == i])
        assert data.counts()[i].tolist() == np.bincount(y[ids == i], minlength=2).tolist()


def test_strings_are_ids_too():
    x, y, ids = table()
    names = np.array(["d", "a", "c", "b"])[ids]
    data = Federation.from_table(torch.from_numpy(x), torch.from_numpy(y), names.astype(object))
    assert np.array_equal(data.client(0)[0], x[names == "a"]) and data.names == tuple("abcd")


def test_a_memory_mapped_pool_stays_where_it_is(tmp_path, recwarn):
    x, y, ids = table()
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    data = Federation.from_table(mapped, y, ids)
    assert data.x.data_ptr() == mapped.ctypes.data and not recwarn


def test_held_out_samples_are_those_of_the_slow_way():
    x, y, ids = table(60, 7)
    data, lists = (
        Federation.from_table(x, y, ids).split(test=0.3, seed=5),
        Federation.from_table(x, y, ids).index["train"],
    )
    for i, rows in enumerate(lists):
        order, cut = (
            torch.from_numpy(np.random.RandomState(5).permutation(len(rows))),
            -(-3 * len(rows) // 10),
        )
        assert torch.equal(data.index["test"][i], rows[order[:cut]]) and torch.equal(
            data.index["train"][i], rows[order[cut:]]
        )


@pytest.mark.parametrize(
    "client",
    [[0, 1.5] * 6, [0, np.nan] * 6, [True, False] * 6, [None, "a"] * 6, range(11), None],
    ids=str,
)
def test_ids_that_are_none(client):
    x, y, _ = table()
    with pytest.raises(ValueError, match=r"(y and )?client: expected a [^\n]+ samples?, got .*\.$"):
        Federation.from_table(x, y, client)


def test_a_data_frame_is_its_columns():
    pandas = pytest.importorskip("pandas")
    x, y, ids = table()
    who = np.array(["b", "a", "d", "c"])[ids]
    frame = pandas.DataFrame({"u": x[:, 0], "label": y, "v": x[:, 1], "who": who})
    want = Federation.from_table(x[:, :2], y, who)
    got = Federation.from_table(frame, "label", "who")
    assert torch.equal(got.x, want.x) and torch.equal(got.y, want.y)
    assert torch.equal(got.lists("train").flat, want.lists("train").flat)
    for bad, names, said in (
        (frame, {"client": "who"}, "y and client: expected two of"),
        (frame[["label", "who"]], {"y": "label", "client": "who"}, "y and client: expected two of"),
        (frame, {"y": "label", "client": "u"}, "x: expected columns of numbers .*who"),
    ):
        with pytest.raises(ValueError, match=said):
            Federation.from_table(bad, **names)
