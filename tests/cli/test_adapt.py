"""`pflcore adapt` makes a model for a client that was not in the run."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from parts.commands import command
from small import equals

from pflcore import Simulation, Training
from pflcore.lab.data import federation_of
from pflcore.nn.models import model_for
from pflcore.simulation import load_model

pytest.importorskip("tyro")
pd = pytest.importorskip("pandas")
from parts.hospitals import CLASSES, FEATURES, table  # noqa: E402

NEWCOMER = ["visits", "hospital", "answer", "income", "age"]  # in an order of its own


@pytest.fixture(params=["ditto", "feddwa", "fedavg"])
def method(request):
    """A method with a run in the folder out, and a newcomer in site.csv."""
    table().to_csv("all.csv", index=False)
    assert command(f"run {request.param} {RUN} --out out --quiet") == 0
    table(seed=3)[NEWCOMER].to_csv("site.csv", index=False)
    return request.param


RUN = (
    "--data table:all.csv --client hospital --label answer --standardize True "
    "--model linear --rounds 3 --lr 0.1 --batch-size 8 --seed 2"
)


def by_python(method):
    """The newcomer's model of the same run in Python, its test samples, and labels."""
    data = federation_of(
        "table:all.csv", client="hospital", label="answer", standardize=True
    )
    model = partial(model_for, "linear", data.shape, data.classes)
    training = Training(lr=0.1, batch_size=8)
    history = Simulation(method, model, data, training, rounds=3, seed=2).run()
    site = pd.read_csv("site.csv")
    order = np.random.RandomState(0).permutation(len(site))
    test, train = site.iloc[order[:30]], site.iloc[order[30:]]
    parts = {"train": train, "test": test}
    splits = {s: (p[[*FEATURES]], p["answer"].to_numpy()) for s, p in parts.items()}
    return history.adapt(splits, 4), *splits["test"]


@pytest.mark.deep("together they take seconds", quick=6)
def test_the_model_is_that_of_the_history(method, capsys):
    assert command("adapt out site.csv --rounds 4 --out new") == 0

    want, x, y = by_python(method)
    got = load_model("new", 0)
    equals(got.scores(x), want.scores(x))
    assert want.class_names == tuple(sorted(CLASSES))
    accuracy = np.mean(want.predict(x) == y)
    told = capsys.readouterr().out
    assert "90 samples to train on, 30 held out" in told
    assert f"accuracy: {accuracy:.1%} of the samples that were held out" in told


@pytest.mark.deep("together they take seconds", quick=6)
def test_the_folder_of_the_run_is_as_before(method, capsys):
    before = {p: p.read_bytes() for p in files("out")}
    assert command("adapt out site.csv --test 0") == 0
    after = {p: p.read_bytes() for p in files("out")}
    assert {p: after[p] for p in before} == before
    assert all("adapted" in p.parts for p in after.keys() - before.keys())
    assert "120 samples to train on, 0 held out" in capsys.readouterr().out
    assert command(f"predict out/{method}-seed2/adapted site.csv --client 0") == 0


def files(folder):
    return [p for p in Path(folder).rglob("*") if p.is_file()]


@pytest.mark.deep("it takes a second")
def test_numbers_in_an_archive(capsys):
    words = "--data synthetic_linear --n 3 --rounds 2 --lr 0.01 --out out --quiet"
    assert command(f"run ditto {words}") == 0
    generator = torch.Generator().manual_seed(1)
    data = federation_of("synthetic_linear", n=3)
    x = torch.randn(20, *data.shape, generator=generator, dtype=data.x.dtype)
    y = torch.zeros(20, *data.y.shape[1:], dtype=data.y.dtype)
    np.savez("site.npz", x=x, y=y)
    assert command("adapt out site.npz") == 0
    assert "rmse: " in capsys.readouterr().out


BAD = """\
adapt nowhere site.csv | folder: expected the folder of one run, got nowhere with none
adapt out none.csv | data: expected a file that is there, got 'none.csv'
adapt out site.csv --label answers | site.csv: expected all columns of the run, got no
adapt out none.npz | none.npz: expected samples, each with a target, got 0 samples and
adapt out short.npz | short.npz: expected samples, each with a target, got 5 samples and
adapt out few.csv --test 0.9 | test: expected samples left to train on, got 1
"""


@pytest.mark.deep("it takes a second")
@pytest.mark.parametrize("method", ["fedavg"], indirect=True)
def test_a_wrong_word_is_one_sentence(method, capsys):
    table(seed=3)[NEWCOMER].head(1).to_csv("few.csv", index=False)
    np.savez("none.npz", x=np.zeros((0, 3)), y=np.zeros(0))
    np.savez("short.npz", x=np.zeros((5, 3)), y=np.zeros(4))
    for line in BAD.splitlines():
        words, error = line.split(" | ")
        assert command(words) == 2
        assert error in capsys.readouterr().err
    for checkpoint in files("out"):
        if checkpoint.suffix == ".safetensors":
            checkpoint.unlink()
    assert command("adapt out site.csv") == 2
    assert "folder: expected a run with its checkpoint" in capsys.readouterr().err
