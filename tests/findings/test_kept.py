"""A checkpoint stands: whatever the file system says of its folder, whatever a callback wrote,
whoever was there before."""

import os

import numpy as np
import pytest
import torch
from torch import nn

from pflcore import Federation, Hardware, Simulation, Training
from pflcore.simulation.checkpoint import load, save


def test_a_folder_that_cannot_be_synced_costs_no_checkpoint(tmp_path, monkeypatch):
    sync = os.fsync

    def failing(handle):
        if os.path.isdir(f"/proc/self/fd/{handle}"):
            raise OSError(5, "Input/output error")
        sync(handle)

    monkeypatch.setattr(os, "fsync", failing)
    for k in (1, 2):
        save(tmp_path, {"x": torch.full((3,), float(k))}, {"k": k})
    tensors, facts = load(tmp_path)
    assert tensors["x"].tolist() == [2, 2, 2] and facts["k"] == 2


@pytest.mark.skipif(os.name == "nt", reason="no links: not POSIX")
def test_what_a_link_points_to_is_not_written_over(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "checkpoint.json.part").symlink_to(victim)
    save(tmp_path / "folder", {"x": torch.zeros(2)}, {})
    assert victim.read_text() == "mine"


def test_what_a_callback_adds_to_a_record_is_kept(tmp_path):
    parts = [(torch.randn(6, 2), torch.arange(6) % 2) for _ in range(2)]
    data = Federation.from_arrays(parts, test=parts)

    def more(round, record):
        record["gap"], record["many"], record["row"] = np.float32(0.5), np.arange(2), torch.ones(2)

    run = Simulation("fedavg", nn.Linear(2, 2), data, Training(lr=0.1), rounds=2)
    run.run(on_round=more, checkpoint=tmp_path)
    again = Simulation.load(tmp_path, model=nn.Linear(2, 2), data=data).run()
    assert (
        again.rounds[0]["gap"] == 0.5
        and again.rounds[0]["many"] == [0, 1]
        and again.rounds[0]["row"] == [1, 1]
    )


def test_a_full_disk_is_a_sentence_and_no_killed_process(tmp_path, monkeypatch):
    """A mapped file that cannot grow ends the process (SIGBUS)."""
    parts = [(torch.randn(6, 2), torch.arange(6) % 2) for _ in range(3)]
    data = Federation.from_arrays(parts, test=parts)
    run = Simulation(
        "ditto", nn.Linear(2, 2), data, Training(lr=0.1), rounds=2, hardware=Hardware(rows=tmp_path)
    )

    def look(round, record):
        assert run.state.round == round  # the run goes on with a copy
        monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Full", (), {"free": 100}))

    with pytest.raises(
        OSError, match=r"rows: a copy of the (clients' rows|state) needs up to .* make room"
    ):
        run.run(look)
