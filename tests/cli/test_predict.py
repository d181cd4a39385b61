"""`pflcore predict` predicts by the models that a run has left."""

import csv
import io
import shutil

import numpy as np
import pytest
import torch
from parts.commands import command
from parts.user import simulation
from small import equals, images, tiny_model

pytest.importorskip("tyro")
pd = pytest.importorskip("pandas")
from parts.hospitals import CLASSES, FEATURES, HOSPITALS, hospitals, table  # noqa: E402

MODEL = tiny_model(3, 3)


@pytest.fixture
def history():
    """A run in whose folder `models` its models are; samples are in new.csv."""
    history = simulation("ditto", hospitals().standardize(), model=MODEL).run()
    history.export("models")
    table(seed=3)[["visits", "hospital", "income", "age"]].to_csv(
        "new.csv", index=False
    )
    return history


def lines(text):
    return list(csv.reader(io.StringIO(text)))


@pytest.mark.parametrize("client", HOSPITALS)
def test_predictions_are_those_of_the_history(history, capsys, client):
    assert command(f"predict models new.csv --client {client}") == 0

    header, *rows = lines(capsys.readouterr().out)

    assert header == ["prediction"]
    want = history.predict(client, pd.read_csv("new.csv"))
    assert [row[0] for row in rows] == want.tolist()


def test_options_may_stand_between_folder_and_data(history, capsys):
    assert command("predict models --client H11 new.csv --scores --out out.csv") == 0
    assert capsys.readouterr().out == ""
    with open("out.csv") as file:
        header, *rows = csv.reader(file)
    assert header == ["prediction", *(f"score {name}" for name in CLASSES)]
    want = history.model("H11").scores(pd.read_csv("new.csv")).numpy()
    np.testing.assert_array_equal(np.array([r[1:] for r in rows], np.float32), want)


def test_probabilities_are_those_of_the_scores(history, capsys):
    words = "predict models new.csv --client H11 --scores --probabilities"
    assert command(words) == 0

    header, *rows = lines(capsys.readouterr().out)

    assert header[-3:] == [f"probability {name}" for name in CLASSES]
    numbers = torch.tensor([[float(cell) for cell in row[1:]] for row in rows])
    assert torch.allclose(numbers[:, :3].softmax(1), numbers[:, 3:])


def test_a_client_is_a_number_where_no_name_is_one(history, capsys):
    command("predict models new.csv --client 2")
    by_number = capsys.readouterr().out
    command("predict models new.csv --client north")
    assert capsys.readouterr().out == by_number


def test_a_number_is_a_name_where_names_are_numbers(history, capsys):
    rows = table().assign(hospital=np.repeat([7, 1, 2], 40))
    data = type(hospitals()).from_table(rows, "answer", "hospital", classes=CLASSES)
    run = simulation("local", data.split(test=0.3), model=MODEL, rounds=1).run()
    run.export("numbered")
    command("predict numbered new.csv --client 1")
    _, *answers = lines(capsys.readouterr().out)
    want = run.predict("1", pd.read_csv("new.csv"))
    assert [row[0] for row in answers] == want.tolist()
    assert command("predict numbered new.csv --client 0") == 2
    error = capsys.readouterr().err
    assert "client: expected the name of a client ('1', '2', '7'), got '0'" in error


GAPS = {
    "empty cells": "1,2,3\n,,\n4,5,6\n",
    "empty texts": '1,2,3\n"","",""\n4,5,6\n',
    "blank line": "1,2,3\n\n4,5,6\n\n\n",
    "spaces": "1,2,3\n  \n4,5,6\n",
    "one empty cell": "1,2,3\n7,,8\n4,5,6\n",
    "carriage returns": "1,2,3\r\n,,\r\n4,5,6\r\n\r\n",
}


@pytest.mark.deep("together they take seconds", quick=8)
@pytest.mark.parametrize("text", GAPS.values(), ids=GAPS)
@pytest.mark.parametrize("words", ["", "--scores"])
def test_a_line_of_gaps_has_an_empty_prediction(history, capsys, text, words):
    for file, rows in (("gaps.csv", text), ("whole.csv", "1,2,3\n4,5,6\n")):
        with open(file, "w", newline="") as out:
            out.write(f"{','.join(FEATURES)}\n{rows}")
    assert command(f"predict models whole.csv --client H03 {words}") == 0
    header, first, last = lines(capsys.readouterr().out)

    assert command(f"predict models gaps.csv --client H03 {words}") == 0

    got = lines(capsys.readouterr().out)
    assert got == [header, first, [""] * len(header), last]


def test_a_last_line_of_gaps_counts(history, capsys):
    with open("gaps.csv", "w") as out:
        out.write(f"{','.join(FEATURES)}\n,,\n1,2,3\n,,\n\n")
    assert command("predict models gaps.csv --client H03") == 0
    _, *rows = lines(capsys.readouterr().out)
    assert [row == [""] for row in rows] == [True, False, True]


@pytest.mark.parametrize("rows", ["", "\n", "\n\n,,\n"])
def test_names_alone_are_no_samples(history, capsys, rows):
    with open("names.csv", "w") as out:
        out.write(",".join(FEATURES) + rows)
    assert command("predict models names.csv --client H03") == 2
    text = capsys.readouterr().err
    assert "names.csv: expected rows of values below the names, got none" in text


@pytest.mark.parametrize("text", ["1.0,2,3\n,,\n4,5,6\n", "0,1,2\n1,2,3\n\n4,5,6\n"])
def test_gaps_of_numbers_without_names_count(capsys, text):
    data = images(shape=(3,))
    run = simulation("fedavg", data, model=tiny_model(3, 4)).run()
    run.export("plain")
    with open("gaps.csv", "w") as out:
        out.write(text)

    assert command("predict plain gaps.csv --client 0") == 0

    _, *rows = lines(capsys.readouterr().out)
    first, last = run.predict(0, [[1.0, 2, 3], [4, 5, 6]]).tolist()
    assert rows == [[str(first)], [""], [str(last)]]


@pytest.mark.deep("together they take seconds", quick=4)
@pytest.mark.parametrize(
    "words, error",
    [
        ("models new.csv --client H1", "client: got 'H1', did you mean 'H11'?"),
        ("models no.csv --client H03", "data: expected a file that is there"),
        ("models models/manifest.json --client H03", "data: expected a file .csv"),
        ("new new.csv --client H03", "folder: expected a folder that history.export"),
        ("models age.csv --client H03", "x: expected the columns age, income, visits"),
        ("models word.csv --client H03", "got words, dates or objects in ['age']"),
        ("models twice.csv --client H03", "expected each column once, got ['age']"),
        ("models short.csv --client H03", "words, dates or objects in ['visits']"),
    ],
)
def test_a_wrong_word_is_one_sentence(history, capsys, words, error):
    names = ",".join(FEATURES)
    for file, text in {
        "age.csv": "age\n1\n",
        "word.csv": f"{names}\n1,2,3\nold,2,3\n",
        "twice.csv": f"{names},age\n1,2,3,4\n",
        "short.csv": f"{names}\n1,2\n",
    }.items():
        with open(file, "w") as out:
            out.write(text)
    assert command(f"predict {words}") == 2
    text = capsys.readouterr().err
    assert error in text and text.count("\n") == 1


@pytest.mark.deep("together they take seconds", quick=3)
@pytest.mark.parametrize("kind", ["npy", "npz", "csv"])
def test_samples_without_names(history, capsys, kind):
    data = images(shape=(6,))
    run = simulation(data=data, rounds=1).run()
    run.export("plain")
    x = data.client(0, "test")[0]
    if kind == "npy":
        np.save("x.npy", x.numpy())
    elif kind == "npz":
        np.savez("x.npz", x=x.numpy())
    else:
        np.savetxt("x.csv", x.numpy(), delimiter=",", fmt="%.9g")
    assert command(f"predict plain x.{kind} --client 0") == 0
    answers = [int(row[0]) for row in lines(capsys.readouterr().out)[1:]]
    equals(answers, run.predict(0, x).tolist())


def test_a_run_exports_what_predict_reads(tmp_path, capsys):
    rows = table()
    (tmp_path / "sites").mkdir()
    for name, part in rows.groupby("hospital"):
        part = part.assign(y=part["answer"].map(CLASSES.index))
        part[[*FEATURES, "y"]].to_csv(f"sites/{name}.csv", index=False)
    words = (
        "run waffle --data folder:sites --target H11 --standardize True --rounds 2 "
        f"--quiet --out o --export --classes {' '.join(CLASSES)}"
    )
    assert command(words) == 0
    assert "for client H11" in capsys.readouterr().out
    rows.to_csv("new.csv", index=False)
    assert command("predict o/waffle-seed0/models new.csv --client H11") == 0
    first = capsys.readouterr().out
    answers = [row[0] for row in lines(first)[1:]]
    assert len(answers) == len(rows) and set(answers) <= set(CLASSES)

    for folder in ("o", "o/waffle-seed0"):  # the only run's models are meant
        assert command(f"predict {folder} new.csv --client H11") == 0
        assert capsys.readouterr().out == first
    shutil.copytree("o/waffle-seed0", "o/waffle-seed1")
    assert command("predict o new.csv --client H11") == 2
    error = capsys.readouterr().err
    places = "o/waffle-seed0/models, o/waffle-seed1/models"
    assert f"models of one run ({places}), got o" in error


def test_a_model_of_ones_own_class_is_named(history, capsys, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "class Own(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.head = torch.nn.Linear(3, 3)\n"
        "    def forward(self, x):\n"
        "        return self.head(x)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    from mine import Own

    run = simulation("apfl", hospitals().standardize(), model=Own, rounds=1).run()
    run.export("own")
    assert command("predict own new.csv --client H03") == 2
    text = capsys.readouterr().err
    assert "--model package.module:function" in text and text.count("\n") == 1
    assert command("predict own new.csv --client H03 --model mine:Own") == 0
    answers = [row[0] for row in lines(capsys.readouterr().out)[1:]]
    assert answers == run.predict("H03", pd.read_csv("new.csv")).tolist()
