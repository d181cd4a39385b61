"""Each test of the command line starts in an empty folder, and draws no pictures."""

import pytest
from parts.commands import draw_nothing


@pytest.fixture(autouse=True)
def pictures(tmp_path, monkeypatch):
    """A function that turns the pictures on."""
    monkeypatch.chdir(tmp_path)
    with pytest.MonkeyPatch.context() as without:
        draw_nothing(without)
        yield without.undo
