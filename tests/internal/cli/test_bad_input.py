"""The command line under hostile use: nothing of anybody's is written over, nothing is lost, wrong
arguments are said before a record."""

import pytest

from pflcore.cli import play

pytest.importorskip("tyro")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pflcore.results.pictures.draw", lambda *_: [])


def test_two_runs_that_start_at_once_take_two_folders():
    made = {play._new_folder(["fedavg"], "digits", "A") for _ in range(3)}
    assert {p.name for p in made} == {
        "fedavg-digits-A",
        "fedavg-digits-A-2",
        "fedavg-digits-A-3",
    } and all(p.is_dir() for p in made)
