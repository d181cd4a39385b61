"""Text as tokens: LEAF's and TFF's files, and made-up text."""

import json

import torch
from entry_points import (
    leaf,
    sentence,
    synthetic_text,
)
from small import equals
from torch import nn

from pflcore import Simulation, Training


def as_text(tokens, data):
    """The tokens without padding, as one text."""
    return "".join(data.class_names[token] for token in tokens.tolist() if token)


# LEAF -------------------------------------------------------------------------


def write_leaf(path, users):
    path.parent.mkdir(parents=True, exist_ok=True)
    counts = [len(samples["y"]) for samples in users.values()]
    content = {"users": [*users], "num_samples": counts, "user_data": users}
    path.write_text(json.dumps(content))


def test_leafs_shakespeare_is_characters(tmp_path):
    lines = {"x": ["To be, or", "not 2 be:"], "y": ["n", "1"]}
    # A user whose targets are digits alone must not make them numbers.
    digits = {"x": ["a bc", "\u00e9"], "y": ["1", "2"]}
    write_leaf(tmp_path / "train" / "a.json", {"ann": lines, "bob": digits})
    write_leaf(tmp_path / "test" / "a.json", {"ann": digits, "bob": digits})

    data = leaf(tmp_path, text="characters", length=9)

    special = ("<pad>", "<other>", "<begin>", "<end>")
    assert data.class_names[:4] == special and data.classes == len(data.class_names)
    x = data.x[data.index["train"][0]]
    assert [as_text(row, data) for row in x] == lines["x"] and x.dtype == torch.int64
    assert [data.class_names[c] for c in data.y[data.index["train"][0]]] == ["n", "1"]
    assert [data.class_names[c] for c in data.y[data.index["train"][1]]] == ["1", "2"]
    assert as_text(data.x[data.index["train"][1]][1], data) == "<other>"


def test_characters_are_all_that_ascii_prints(tmp_path):
    printed = "".join(map(chr, range(32, 127)))
    lines = {"x": [printed + "\u00e9\n"], "y": ["~"]}
    write_leaf(tmp_path / "train" / "a.json", {"ann": lines})
    write_leaf(tmp_path / "test" / "a.json", {"ann": lines})

    data = leaf(tmp_path, text="characters", length=97)

    assert as_text(data.x[0], data) == f"{printed}<other>\n"
    assert data.class_names[data.y[0]] == "~"


def test_leafs_sent140_is_words(tmp_path):
    rows = [["7", "Mon", "NO_QUERY", "ann", text] for text in ("Good, good", "sad day")]
    test_rows = [["8", "Tue", "NO_QUERY", "ann", "rare good"]]
    write_leaf(tmp_path / "train" / "a.json", {"ann": {"x": rows, "y": ["1", "0"]}})
    write_leaf(tmp_path / "test" / "a.json", {"ann": {"x": test_rows, "y": ["1"]}})

    data = leaf(tmp_path, text="words", length=3, vocabulary=3)

    # good is the most frequent word; "," and day come next, by their spelling.
    assert data.x.tolist() == [[4, 5, 4], [1, 6, 0], [1, 4, 0]]
    assert data.y.tolist() == [1, 0, 1] and data.classes == 2
    with sentence(".*numbers .for words their numbers; of LEAF's text say", OSError):
        leaf(tmp_path)


def test_an_input_that_is_no_text_is_named(tmp_path):
    write_leaf(tmp_path / "a.json", {"ann": {"x": [[1, 2]], "y": [1]}})
    with sentence(r"x of ann: expected texts, or Sent140's rows, got \[1, 2\]"):
        leaf(tmp_path, text="words")


# made-up text -----------------------------------------------------------------


def test_made_up_text_has_the_transitions_that_truth_tells():
    data = synthetic_text(n=2, samples=400, held_out=1, letters=4, surprise=0.4)

    for i in range(data.n):
        rows = data.index["train"][i]
        pairs = data.x[rows].flatten() * 4 + data.y[rows].flatten()
        counts = torch.bincount(pairs, minlength=16).view(4, 4).double()
        got = counts / counts.sum(1, keepdim=True)
        want = data.truth["transition"][i].double()
        torch.testing.assert_close(got, want, rtol=0, atol=0.05)
    equals(data.x[:, 1:], data.y[:, :-1])
    assert data.class_names == ("a", "b", "c", "d")


def test_more_clients_change_no_text():
    few, many = synthetic_text(n=2, seed=3), synthetic_text(n=5, seed=3)
    for i in range(2):
        for split in few.splits:
            equals(few.x[few.index[split][i]], many.x[many.index[split][i]])
    assert not torch.equal(few.x, synthetic_text(n=2, seed=4).x)


class NextLetter(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, 8)
        self.lstm = nn.LSTM(8, 16, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.lstm(self.embed(x))[0]).movedim(-1, 1)  # [B, C, T]


def test_an_lstm_learns_made_up_text():
    data = synthetic_text(n=2, letters=4, length=6, surprise=0.0, samples=60)
    training = Training(lr=2.0, batch_size=20, epochs=3)

    history = Simulation("local", NextLetter(), data, rounds=3, training=training).run()

    x = data.x[data.index["test"][1]]
    y = data.y[data.index["test"][1]]
    assert (history.model(1).predict(x, class_numbers=True) == y).float().mean() > 0.95
