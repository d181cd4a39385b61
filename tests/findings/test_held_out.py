"""What is held out stays held out, and a mean over all clients stays one where clients join."""

import torch
from torch import nn

from pflcore import Client, Federation, Server, Training, cross_silo

gen = torch.Generator().manual_seed(0)


def federation(splits):
    made = [
        {s: (torch.randn(n, 6, generator=gen), torch.arange(n) % 4) for s, n in splits.items()}
        for _ in range(5)
    ]
    return Federation.from_arrays(made, classes=4)


def rows(data, split):
    return set(data.lists(split).flat.tolist())


def test_a_test_split_that_is_there_stays_the_test_split():
    data = federation({"train": 40, "test": 10})
    made = cross_silo(data).data
    assert rows(made, "test") == rows(data, "test") and rows(made, "train") | rows(
        made, "val"
    ) == rows(data, "train")
    assert [len(i) for i in made.index["val"]] == [8] * 5 and not made.notes  # 15 of 85 %, at least


def test_a_validation_split_that_is_there_stays_one():
    data = federation({"train": 40, "val": 10})
    made = cross_silo(data).data
    assert rows(made, "val") == rows(data, "val") and rows(made, "train") | rows(
        made, "test"
    ) == rows(data, "train")


def test_fractions_divide_everything_anew_and_say_so():
    data = federation({"train": 40, "test": 10})
    made = cross_silo(data, {"train": 0.5, "val": 0.2, "test": 0.3}).data
    assert made.size("test").tolist() == [15] * 5 and "test were divided anew" in made.notes[-1]


def test_scaffolds_control_variate_is_the_mean_of_all_after_a_client_joined():
    """Algorithm 1 of SCAFFOLD: c is the mean of the c_i, also of more clients than the server
    expected."""
    data = [(torch.randn(8, 3, generator=gen), torch.randn(8, generator=gen)) for _ in range(4)]
    model = nn.Linear(3, 1, bias=False)
    server = Server("scaffold", model, 3, rounds=400)
    training = Training(lr=0.1, batch_size=8)
    clients = [Client("scaffold", model, d, training, loss="squared") for d in data]
    for r in range(400):
        ids = range(3 if r < 5 else 4)
        for i in ids:
            server.join(f"c{i}")
        server.aggregate({f"c{i}": clients[i].train(server.download(f"c{i}")) for i in ids})
    x, y = (torch.cat(parts).double() for parts in zip(*data, strict=True))
    best = torch.linalg.lstsq(x, y[:, None]).solution.flatten()
    torch.testing.assert_close(
        server.state_dict()["state"]["server.x"].double(), best, rtol=0, atol=1e-5
    )
