"""What people bring: arrays of any memory, files as other programs write them, ids of every
kind."""

import csv
import json

import numpy as np
import pytest
import torch
from doors import folder, leaf
from small import with_test
from torch import nn

from pflcore import Evaluation, Federation, Simulation, Training, ops
from pflcore.data import federation_of, padded

X, Y = np.arange(24, dtype=np.float32).reshape(8, 3), np.array([0, 1] * 4)


@pytest.mark.parametrize(
    "x",
    [X[::-1][::-1], X.astype(">f4"), X[:, ::-1][:, ::-1], np.asfortranarray(X)],
    ids=["back", "big", "rows", "f"],
)
def test_arrays_of_any_memory(x):
    for given in (x, x[::-1]):
        fed = Federation.from_clients([(given, Y)])
        assert fed.x.tolist() == given.tolist()


@pytest.mark.parametrize("kind", [str, object])
def test_words_in_an_array_are_named(kind):
    with pytest.raises(ValueError, match=r"y of client 0 .*turn images and words into numbers"):
        Federation.from_clients([(X, np.array(["cat", "dog"] * 4, dtype=kind))])


def test_clients_from_a_generator():
    assert Federation.from_clients((X, Y) for _ in range(3)).n == 3


@pytest.mark.parametrize("seed", [None, 1.7, -1, 2**32])
def test_a_seed_is_one_that_repeats(seed):
    fed = Federation.from_clients([(X, Y)])
    calls = (
        lambda: fed.split(test=0.5, seed=seed, of=None),
        lambda: fed.halves(seed=seed),
        lambda: fed.split_clients(1, 0, 0, seed=seed),
        lambda: Federation.from_clients([(X, Y)]).split(test=0.5, seed=seed),
        lambda: Federation.from_table(X, Y, Y).split(test=0.5, seed=seed),
        lambda: federation_of("mnist5k", seed=seed),
    )
    for call in calls:
        with pytest.raises(
            ValueError, match="seed: expected a whole number from 0 to 2\\*\\*32 - 1"
        ):
            call()


@pytest.mark.parametrize(
    "clients", [[0.9, 1], [False, True], torch.tensor([True, False]), ["a"], [[0]]]
)
def test_clients_are_chosen_by_number(clients):
    with pytest.raises(
        ValueError, match=r"clients: expected distinct ids in 0\.\.1, at least one, got "
    ):
        Federation.from_clients([(X, Y), (X, Y)]).subset(clients)


def test_numbers_of_numpy_are_numbers():
    fed = Federation.from_clients([(X, Y)] * 4)
    assert [len(g) for g in fed.split_clients(np.int64(2), np.int64(1), np.int64(1))] == [2, 1, 1]
    assert fed.subset(np.array([2, 0])).n == 2 and fed.subset([torch.tensor(3)]).n == 1


def test_a_share_is_what_it_says_in_decimals():
    fed = Federation.from_clients([(np.zeros((100, 1), np.float32), np.zeros(100, np.int64))])
    assert [int(fed.keep(f).size()[0]) for f in (0.07, 0.55, 0.071, 1e-12)] == [7, 55, 8, 1]


def test_labels_and_ids_that_cannot_be():
    with pytest.raises(ValueError, match="y: expected int64 labels in"):
        Federation.from_clients([(X, np.full(8, -1))])
    with pytest.raises(ValueError, match="classes: expected a whole number, at least 1 or 'infer'"):
        Federation.from_clients([(X, Y)], classes=3.0)
    with pytest.raises(ValueError, match="client: expected a whole number or a string"):
        Federation.from_table(X, Y, np.array([2**63] * 8, dtype=np.uint64))


# files ----------------------------------------------------------------------
def test_a_header_is_known_and_columns_agree(tmp_path):
    def made(**files):
        at = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        at.mkdir()
        for name, text in files.items():
            (at / f"{name}.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
        return at

    rows = "1,2.5,0\n3,4.5,1\n"
    # Excel marks its UTF-8
    assert int(folder(made(a=b"\xef\xbb\xbf" + rows.encode())).size()[0]) == 2
    assert folder(made(a="\ufefff,g,lab\n" + rows), target="lab").classes == 2
    numbered = folder(made(a="0,1,2\n" + rows))
    # pandas numbers the columns of an array
    assert int(numbered.size()[0]) == 2 and numbered.classes == 2
    with pytest.raises(OSError, match="expected rows of numbers"):
        folder(made(a=",2.5,0\n" + rows))
    with pytest.raises(
        ValueError,
        match=r"b\.csv: expected the columns of other files, \('f', 'g', 'y'\), got \('g', 'f'",
    ):
        folder(made(a="f,g,y\n" + rows, b="g,f,y\n" + rows))
    with pytest.raises(OSError, match="expected rows of numbers in UTF-8"):
        folder(made(a="é,g,y\n".encode("latin-1") + rows.encode()))


def test_arrays_in_a_file_are_numbers(tmp_path):
    np.savez(tmp_path / "a.npz", x=X, y=np.array(["cat"] * 8))
    with pytest.raises(OSError, match="expected arrays of numbers x and y"):
        folder(tmp_path)


def test_a_user_without_test_samples(tmp_path):
    for split, of in (("train", ["u", "v"]), ("test", ["u", "v"])):
        data = {
            u: {"x": [[1.0, 2.0]], "y": [1]} if (u, split) != ("v", "test") else {"x": [], "y": []}
            for u in of
        }
        (tmp_path / split).mkdir()
        content = {"users": of, "num_samples": [len(data[u]["y"]) for u in of], "user_data": data}
        (tmp_path / split / "all.json").write_text(json.dumps(content))
    assert leaf(tmp_path).size("test").tolist() == [1, 0]


def test_an_argument_of_another_kind_is_one_sentence():
    pair = (torch.randn(4, 2), torch.arange(4) % 2)
    for words, call in (
        (
            "dtype: expected a torch.dtype, got 'float32'",
            lambda: Federation.from_clients([pair], dtype="float32"),
        ),
        (
            "clients: expected distinct ids in 0..0, at least one, got 0",
            lambda: Federation.from_clients([pair]).subset(0),
        ),
        ("value: expected a finite number, got None", lambda: padded([[5, 6], [8]], value=None)),
        (
            "value: expected a whole number, as the sequences are, got 0.5",
            lambda: padded([[5, 6], [8]], value=0.5),
        ),
        (
            "waffle_weights: omega must be a number",
            lambda: ops.waffle_weights(torch.rand(3), 0, np.array([0.5, 0.6])),
        ),
        ("Files: paths must be names of files", lambda: ops.stream.Files([1])),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            call()


def test_row_numbers_of_pandas_are_no_inputs():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {"noise": np.arange(8.0), "y": [0, 1] * 4, "client": [0] * 4 + [1] * 4}
    ).sample(frac=1, random_state=0)
    assert Federation.from_table(frame).x.shape[1:] == (1,)


@pytest.mark.parametrize("first", ["", "Unnamed: 0"])
def test_a_column_of_row_numbers_in_a_csv_file_is_refused(tmp_path, first):
    with open(tmp_path / "a.csv", "w", newline="") as file:
        csv.writer(file).writerows([[first, "x", "y"], [0, 1.5, 0], [1, 2.5, 1]])
    with pytest.raises(ValueError, match="index=False"):
        federation_of(f"folder:{tmp_path}")


def test_no_engine_trains_an_embedding_on_its_padding():
    gen = torch.Generator().manual_seed(0)

    def client():
        x, length = (
            torch.randint(1, 30, (24, 9), generator=gen),
            torch.randint(2, 9, (24,), generator=gen),
        )
        length[:4] = 9  # the first texts happen to be full
        x[torch.arange(9) >= length[:, None]] = 0
        return x, torch.randint(0, 2, (24,), generator=gen)

    def model():
        return nn.Sequential(nn.Embedding(30, 8, padding_idx=0), nn.Flatten(), nn.Linear(72, 2))

    data = Federation.from_clients(
        [{"train": client(), "test": client()} for _ in range(6)], classes=2
    )
    history = Simulation("fedavg", model, data, Training(lr=0.5, batch_size=5), rounds=2).run()
    assert history.model(0).module()[0].weight[0].norm() == 0


@pytest.mark.parametrize("name", ["client", "clients", "round", "seed"])
def test_a_metric_is_not_called_like_a_column_of_the_record(name):
    data = Federation.from_clients(
        with_test(
            [(torch.randn(4, 2), torch.arange(4) % 2)] * 2,
            [(torch.randn(4, 2), torch.arange(4) % 2)] * 2,
        )
    )
    with pytest.raises(ValueError, match=f"metrics: '{name}' is recorded anyway"):
        Simulation(
            "fedavg",
            nn.Linear(2, 2),
            data,
            evaluation=Evaluation(metrics={name: lambda scores, y: 0.0}),
        )


def test_one_token_a_sample_and_a_padding_row():
    gen = torch.Generator().manual_seed(0)
    parts = [
        (torch.randint(0, 5, (12,), generator=gen), torch.randint(0, 2, (12,), generator=gen))
        for _ in range(3)
    ]
    data = Federation.from_clients(with_test(parts, parts), classes=2)
    model = nn.Sequential(nn.Embedding(5, 4, padding_idx=0), nn.Linear(4, 2))
    assert (
        Simulation("fedavg", model, data, Training(lr=0.1), rounds=1)
        .run()
        .series("loss")[1]
        .isfinite()
        .all()
    )


def test_a_dataset_is_read_by_its_own_getitem():
    class Moved(torch.utils.data.TensorDataset):
        def __getitem__(self, i):
            x, y = super().__getitem__(i)
            return x + 100, y

    assert Federation.from_clients([Moved(torch.randn(10, 3), torch.arange(10) % 2)]).x.mean() > 90
