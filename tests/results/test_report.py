"""Tables of runs as Markdown, LaTeX and CSV."""

import csv
import io
import re

import numpy as np
import pytest
import torch
from entry_points import sentence
from hypothesis import given
from hypothesis import strategies as st
from parts.results import N, a_run, cells, line

from pflcore.lab.results import RunEnd
from pflcore.lab.results.table import table
from pflcore.simulation import record as records

ACCURACIES = st.lists(
    st.floats(0, 1, allow_subnormal=False, width=32), min_size=N, max_size=N
)


def histories(*runs):
    """The histories of runs, each a list of its lines."""
    return records.group_runs([one for lines in runs for one in lines])


def short_run(algorithm, accuracy, seed=0, **header):
    """A run of one round."""
    head = {"algorithm": algorithm, "n": N, "seed": seed, **header}
    return [{"header": head}, line(1, accuracy, algorithm=algorithm, seed=seed)]


def csv_rows(runs, **options):
    return [*csv.DictReader(io.StringIO(table(runs, format="csv", **options)))]


TWO = histories(a_run(target=None), a_run("ditto", target=None, shift=0.1))


# the best ---------------------------------------------------------------------
def test_the_best_of_a_column_is_bold():
    rows = [row for row in table(TWO).splitlines() if row.startswith("| ")]
    heading, worse, better = ([c.strip() for c in row.split("|")[1:-1]] for row in rows)

    bold = [name for name, cell in zip(heading, better, strict=True) if "**" in cell]

    assert bold == [r"best\*", "final", "mean of last 10", "worst decile"]
    assert "**" not in "".join(worse)
    assert table(TWO, format="latex").count(r"\textbf{") == len(bold)


def test_the_lines_of_a_table_are_of_one_length():
    lines = [line for line in table(TWO).splitlines() if line.startswith("|")]

    assert len(lines) == 4 and len({len(line) for line in lines}) == 1


def test_a_table_of_one_row_has_no_best():
    assert "**" not in table(TWO[:1])
    assert "textbf" not in table(TWO[:1], format="latex")


def test_all_that_show_the_best_number_are_bold():
    runs = histories(short_run("a", [0.5] * N), short_run("b", [0.500001] * N))
    assert table(runs, columns=["final"]).count("**50.00**") == 2


def test_the_lowest_loss_is_the_best():
    runs = []
    for name, loss in (("a", 0.2), ("b", 0.1)):
        lines = short_run(name, None)
        lines[1]["eval"] = {"loss": [loss] * N, "size": [1] * N}
        runs.append(lines)

    text = table(histories(*runs), columns=["final"])

    assert "**0.10000**" in text and "**0.20000**" not in text


# columns ----------------------------------------------------------------------
def test_columns_are_chosen_by_name_in_the_order_given():
    text = table(TWO, columns=["worst_decile", "final"])
    assert [*cells(text, "waffle")] == ["algorithm", "worst decile", "final"]
    assert "std and worst decile" in text and "the best round" not in text
    assert "at the last evaluation" not in table(TWO, columns=["final"])


def test_a_name_stands_for_the_column_of_each_target():
    runs = histories(a_run(target=1))
    assert [*cells(table(runs, columns=["final"]), "waffle")] == [
        "algorithm",
        "final",
        "client 1: final",
    ]


def test_a_table_calls_clients_by_their_names():
    names = ["north", "east", "south", "west"]
    bad = {"attack": "noise", "clients": [0, 3]}
    text = table(
        histories(a_run(target=2, model_target=2, names=names, adversary=bad)),
        columns=["final", "note"],
    )
    assert "client south: final" in text
    assert "Made for one client, whose columns count: waffle for client south." in text
    assert "noise by clients north, west" in text


@pytest.mark.parametrize("format", ["md", "latex", "csv"])
def test_a_misspelt_column_is_refused(format):
    with sentence("columns: got 'finl', did you mean 'final'[?] Expected some of best"):
        table(TWO, columns=["final", "finl"], format=format)
    with sentence("columns: expected some of .* and hurt with a baseline, got 'hurt'"):
        table(TWO, columns=["hurt"], format=format)
    assert "hurt vs ditto" in table(
        TWO, columns=["hurt"], baseline="ditto", format=format
    ).replace("\\", "")


def test_an_unknown_format_is_refused():
    with sentence("format: got 'tex', did you mean 'latex'[?] Expected 'md' or "):
        table(TWO, format="tex")


# Markdown ---------------------------------------------------------------------
ODD_TEXT = st.text("ab*\\|`\n\r\x85 ", min_size=1, max_size=8)


def markdown_cells(row):
    """The cells of a row, as programs that follow GitHub's rules take it apart.

    A backslash before a punctuation mark makes it a letter; without backticks there is
    no code, in which a bar would be a letter, too. Without stars nothing is emphasized.
    """
    tokens = re.findall(r"\\[!-/:-@[-`{-~]|.", row)
    assert not {"`", "*"} & set(tokens)
    cells = [""]
    for token in tokens:
        if token == "|":
            cells.append("")
        else:
            cells[-1] += token
    assert (cells[0], cells[-1]) == ("", "")
    texts = [re.sub(r"(\\*)\1\\([*|`])", r"\1\2", cell) for cell in cells[1:-1]]
    return [" ".join(text.split()) for text in texts]


@given(ODD_TEXT, ODD_TEXT, ODD_TEXT)
def test_any_names_keep_the_cells_of_markdown(client, method, data):
    names = [client, "east", "south", "west"]
    bad = {"attack": "noise", "clients": [0]}
    run = a_run(method, target=0, model_target=0, names=names, data=data, adversary=bad)

    text = table(histories(run), columns=["final", "note"])

    title, _, about, _, *rows = text.split("\n")
    assert title.startswith("### ") and about.startswith("Test accuracy")
    heading, rule, row, blank = rows[:4]
    assert rule.count("|") == 5 and blank == ""
    (_, _, of_client, _) = markdown_cells(heading)
    assert of_client == " ".join(f"client {client}: final".split())
    (label, *_) = markdown_cells(row)
    assert label == " ".join(method.split())


# LaTeX ------------------------------------------------------------------------
@given(st.text("ab_%&$#{}~^\\<>|` ", min_size=1, max_size=12))
def test_latex_has_no_bare_special_letter(name):
    text = table(histories(short_run(name, [0.5] * N)), format="latex")
    rows = text.partition("\\midrule\n")[2].splitlines()
    label = rows[0].partition(" & 50.00")[0]

    plain = re.sub(r"\\[&%$#_{}]|\\text[a-z]+\{\}", "", label)

    assert not set(plain) & set("_%&$#{}~^\\<>|`")


def test_latex_rows_have_a_cell_for_each_column():
    text = table(
        histories(a_run(data="a_b"), a_run("ditto", 1, data="a_b"), a_run(data="c")),
        format="latex",
    )
    for part in text.split(r"\begin{table}")[1:]:
        (alignment,) = re.findall(r"\\begin\{tabular\}\{(\w+)\}", part)
        rows = [row for row in part.splitlines() if row.endswith(r"\\")]
        counts = {len(re.split(r"(?<!\\)&", row)) for row in rows}
        assert counts == {len(alignment)}
        assert part.count(r"\toprule") == part.count(r"\end{table}") == 1
    assert text.count(r"\begin{table}") == 2 and r"a\_b" in text


def test_latex_leaves_an_empty_column_of_notes_out():
    assert "& note" not in table(TWO, format="latex")
    stopped = histories(a_run())
    stopped[0].end = RunEnd("stopped", "It was enough.")
    text = table(stopped, format="latex")
    assert "& note" in text and "% waffle, seed 0, stopped: It was enough." in text


def test_a_note_of_latex_stays_a_comment():
    stopped = histories(a_run())
    stopped[0].end = RunEnd("stopped", "It was\nenough.")
    assert "% waffle, seed 0, stopped: It was enough.\n" in table(
        stopped, format="latex"
    )


# CSV --------------------------------------------------------------------------
@given(st.lists(ACCURACIES, min_size=1, max_size=3))
def test_csv_has_the_mean_and_the_deviation_over_seeds(values):
    runs = histories(*(short_run("fedavg", v, s) for s, v in enumerate(values)))

    (row,) = csv_rows(runs)

    means = 100 * torch.tensor(values, dtype=torch.float64).mean(1)
    assert float(row["final"]) == pytest.approx(means.mean().item(), abs=1e-7)
    std = row["final std"]
    if len(values) == 1:
        assert std == ""
    else:
        assert float(std) == pytest.approx(np.std(means.numpy(), ddof=1), abs=1e-7)
    assert row["seeds"] == str(len(values))


def test_csv_has_the_rows_of_all_settings():
    rows = csv_rows([*histories(a_run(data="mnist5k")), *TWO])
    assert [row["algorithm"] for row in rows] == ["waffle", "waffle", "ditto"]
    assert "mnist5k" in rows[0]["setting"] and "digits" in rows[1]["setting"]
    # The second setting has no target.
    assert rows[0]["client 1: final"] and rows[1]["client 1: final"] == ""
    assert {row["metric"] for row in rows} == {"accuracy in percent"}


def test_a_missing_number_is_an_empty_field_of_csv():
    (row,) = csv_rows(histories(a_run("local")[:1]))
    assert row["final"] == row["best"] == ""
