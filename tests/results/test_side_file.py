"""Long lists and matrices of a record are in a file beside it."""

import pytest
import torch
from parts.side_file import lines, written

from pflcore.results.record import Record, read


def test_long_lists_come_back_as_they_were(tmp_path):
    path = written(tmp_path / "record.jsonl", lines())
    assert (
        max(map(len, path.read_text().splitlines())) < 700
        and (tmp_path / "record.arrays").stat().st_size > 1500 * 8
    )
    (run,) = read(path)
    head, first, _ = lines()
    got = run.rounds[1]
    assert (
        run.header == head["header"]
        and got["cohort"] == first["cohort"]
        and got["moved"] == first["moved"]
        and got["dropped"] == [3]
    )
    assert all(type(i) is int for i in got["cohort"][:3])
    assert got["eval"]["loss"] == [None if v != v else v for v in first["eval"]["loss"]]
    (w,) = run.weights([2])[1]
    want = torch.zeros(1500, 1500, dtype=torch.float64)
    for i in range(1500):
        want[i].index_put_(
            (first["report"]["index"][i],), first["report"]["weight"][i], accumulate=True
        )
    torch.testing.assert_close(w, want)
    (coarse,) = run.weights([2], most=100)[1]
    torch.testing.assert_close(coarse, want.view(100, 15, 100, 15).sum(3).mean(1))


def test_a_record_that_goes_on_from_its_mark_has_the_bytes_of_one_that_never_stopped(tmp_path):
    whole, path = written(tmp_path / "whole.jsonl", lines()), tmp_path / "record.jsonl"
    head, first, last = lines()
    with Record(path) as record:
        record.write(head), record.write(first)
        mark = record.mark()
        record.write(last)
    with Record(path, mark=mark) as record:
        assert path.with_suffix(".arrays").stat().st_size == mark["arrays"] > 0
        record.write(last)
    assert path.with_suffix(".arrays").read_bytes() == whole.with_suffix(".arrays").read_bytes()
    assert path.read_text() == whole.read_text().replace("whole.", "record.")


def test_what_a_killed_run_left_is_read_up_to_there(tmp_path):
    path = written(tmp_path / "record.jsonl", lines())
    side = tmp_path / "record.arrays"
    side.write_bytes(side.read_bytes()[:-1])
    assert [r["round"] for r in read(path)[0].rounds] == [1]
    side.unlink()
    with pytest.raises(FileNotFoundError, match=r"record\.arrays beside the record"):
        read(path)


def test_a_record_that_replaces_another_takes_its_side_file_away(tmp_path):
    path = written(tmp_path / "record.jsonl", lines())
    Record(path, overwrite=True).close()
    assert not (tmp_path / "record.arrays").exists()
