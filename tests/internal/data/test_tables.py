"""Cells of CSV files: numbers that pandas reads at once are those of their texts."""

import pandas
import pytest

from pflcore.data import _tables
from pflcore.lab.data import federation_of

CELLS = {
    "numbers": ["0.1", "1e-3", "123456789.123456789", "7"],
    "gaps": ["1", "nan", "2", "3"],
    "padded": ["1 ", "2", " 3", "4"],
    "whole": ["007", "8", "9", "10"],
    "large": ["9007199254740993", "1", "2", "18446744073709551615"],
    "infinite": ["1", "2", "inf", "4"],
    "words": ["yes", "no", "yes", "no"],
    "truth": ["TRUE", "FALSE", "TRUE", "TRUE"],
    "mixed": ["1", "x", "2", "3"],
    "marked": ["1_0", "2", "3", "4"],
}


@pytest.mark.parametrize("named", [True, False])
def test_cells_of_a_table_are_those_of_their_texts(named, tmp_path, monkeypatch):
    """Columns of numbers are read at once, with the bits of each cell's `float`."""
    path = tmp_path / "table.csv"
    lines = [",".join(row) for row in zip(*CELLS.values(), strict=True)]
    path.write_text("\n".join([",".join(CELLS), *lines] if named else lines))

    def table():
        return _tables._samples_of(_tables._read_csv(path, ()), path, (), named=named)

    got = table()
    monkeypatch.setattr(_tables, "_read_numbers", lambda *args: None)
    want = table()

    pandas.testing.assert_frame_equal(got, want, check_exact=True, check_dtype=False)
    assert [dtype.kind for dtype in got.dtypes].count("f") == len(CELLS) - 4
    assert got.iloc[0, 0] == 0.1


def test_texts_are_kept_where_they_name_clients(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("client,x,label\n007,1,0\n7,2,1\n")
    assert federation_of(f"table:{path}", fractions={}).names == ("007", "7")


@pytest.mark.parametrize("line", ["1,2", "1,2,3,4", "", ",,", '"1,2",3,4'])
def test_lines_that_are_short_or_empty_are_read_as_texts(line, tmp_path, monkeypatch):
    path = tmp_path / "table.csv"
    path.write_text(f"a,b,c\n1,2,3\n{line}\n4,5,6\n")

    def outcome():
        try:
            table = _tables._read_csv(path, ()).frame(named=True, words=())
            return [list(row) for row in table.to_numpy()]
        except OSError as error:
            return str(error)

    got = outcome()
    monkeypatch.setattr(_tables, "_read_numbers", lambda *args: None)
    assert got == outcome()
