"""Tests of checkpoints.

A run that continues from a checkpoint equals a run without a break. A damaged file ends
in an error of one sentence, and no other file is lost.
"""

import inspect
import json
import random
import signal
import time

import pytest
import torch
from parts.checkpoint import DATA, make
from parts.commands import draw_nothing
from parts.forks import forking_context
from parts.memory import fails
from safetensors import safe_open
from safetensors.torch import save_file
from small import equals, layers

from pflcore.lab import cli
from pflcore.simulation import _describe as describe
from pflcore.simulation._evaluate import has_custom_predict
from pflcore.simulation.record import RecordWriter

# the command line -----------------------------------------------------------
SMALL = "--data synthetic_linear --n 5 --lr 0.01 --quiet"
COMPARE = (
    f"compare --algorithms fedavg ditto {SMALL} --participation 0.5 --rounds 15".split()
)


@pytest.fixture
def no_pictures(monkeypatch):
    pytest.importorskip("tyro")
    draw_nothing(monkeypatch)


def lines_of(folder):
    """The lines of all records of a folder, without the times."""
    lines = []
    for path in sorted(folder.glob("*/record.jsonl")):
        lines += [json.loads(line) for line in path.read_bytes().splitlines()]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


def count(folder):
    """The number of lines in all records of a folder."""
    paths = folder.glob("*/record.jsonl")
    return sum(path.read_bytes().count(b"\n") for path in paths)


@pytest.mark.deep("another process")
def test_a_killed_run_ends_as_the_unbroken_one(tmp_path, no_pictures, capfd):
    forks = forking_context()
    assert cli.main([*COMPARE, "--out", str(tmp_path / "whole")]) == 0
    want = lines_of(tmp_path / "whole")
    rng = random.Random(0)
    kills = 0
    folders = 0
    seen = set()
    while kills < 5:
        folders += 1
        folder = tmp_path / f"broken-{folders}"
        while True:
            every = str(rng.choice((1, 2, 5)))
            words = [
                *COMPARE,
                "--out",
                str(folder),
                "--no-keep-checkpoint",
                "--checkpoint-every",
                every,
            ]
            child = forks.Process(target=cli.main, args=(words,))
            child.start()
            until = count(folder) + rng.randrange(1, 8)
            while child.is_alive() and count(folder) < until:
                time.sleep(0.002)
            time.sleep(rng.random() * 0.01)
            child.kill()
            child.join()
            if child.exitcode == 0:
                break
            assert child.exitcode == -signal.SIGKILL, capfd.readouterr().err
            kills += 1
            seen.add(count(folder))
        assert lines_of(folder) == want
        assert not [*folder.rglob("*.safetensors")] and folders < 8
    assert len(seen) > 2, "the kills came at the same places"


def test_a_damaged_folder_is_left_as_it_is(tmp_path, no_pictures, capsys, monkeypatch):
    argv = (
        f"run fedavg {SMALL} --rounds 9 --out {tmp_path} --checkpoint-every 2"
    ).split()
    # Ctrl-C comes when the line of round 5 is written to the record.
    monkeypatch.setattr(
        RecordWriter, "write", fails(RecordWriter.write, 6, KeyboardInterrupt())
    )
    assert cli.main(argv) == 130
    (path,) = tmp_path.glob("*/checkpoint.safetensors")
    path.write_bytes(path.read_bytes().replace(b"0", b"1"))
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    capsys.readouterr()
    assert cli.main(argv) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "damaged" in err, err
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


@pytest.mark.deep("it takes seconds")
def test_ctrl_c_and_a_run_for_each_client_go_on(tmp_path, no_pictures, monkeypatch):
    argv = (f"run waffle {SMALL} --target all --rounds 4 --checkpoint-every 1").split()
    assert cli.main([*argv, "--out", str(tmp_path / "whole")]) == 0
    from pflcore import step as real

    monkeypatch.setattr(
        "pflcore.simulation._loop.step", fails(real, 11, KeyboardInterrupt())
    )
    assert cli.main([*argv, "--out", str(tmp_path / "broken")]) == 130
    assert cli.main([*argv, "--out", str(tmp_path / "broken")]) == 0
    assert lines_of(tmp_path / "broken") == lines_of(tmp_path / "whole")
    assert not [*(tmp_path / "broken").rglob("*.safetensors")]


# models ---------------------------------------------------------------------
@pytest.mark.deep("together they take seconds", quick=4)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [
        "fedavg",
        "feddwa",
        "finetune",
        "hypcluster",
        "apfl",
        "fedrod",
        "knnper",
        "factorized_waffle",
    ],
)
def test_exported_models_predict_what_the_history_does(name, tmp_path):
    from safetensors.torch import load_file

    one = layers("Linear 6 5, BatchNorm1d 5, Tanh, Linear 5 4")
    history = make(name, model=one).run()
    history.export(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["method"] == name and manifest["predict"]
    assert [c["client"] for c in manifest["clients"]] == [0, 1, 2, 3, 4]
    for entry in manifest["clients"]:
        tensors = load_file(tmp_path / entry["file"])
        assert {k: list(v.shape) for k, v in tensors.items()} == entry["tensors"]
        x = DATA.client(entry["client"], "test")[0]
        kept = history.model(entry["client"])
        want = kept(x).detach()
        if not has_custom_predict(kept.algorithm):
            one.load_state_dict(tensors)
            assert torch.allclose(one.eval()(x).detach(), want, atol=1e-6)
            continue
        for key, value in kept.state_dict().items():
            name = "statistics" if key == "buffer_row" else key.removeprefix("view_")
            own = [
                tensors[k].flatten()
                for k in entry["tensors"]
                if k.partition(".")[0] == name
            ]
            equals(torch.cat(own or [value[:0]]), value.flatten())
        assert manifest["predict"] == inspect.getdoc(kept.algorithm.predict)
        assert manifest["returns"] == kept.returns


def test_every_row_of_a_large_tensor_counts(tmp_path, monkeypatch):
    """The digests that tell data apart take some of its rows."""
    monkeypatch.setattr(describe, "DIGEST_MAX_BYTES", 16)
    make("ditto").save(tmp_path)
    path = tmp_path / "checkpoint.safetensors"
    with safe_open(path, "pt") as file:
        names = file.keys()
        tensors = {name: file.get_tensor(name).clone() for name in names}
        metadata = file.metadata()
    make("ditto").restore(tmp_path)

    tensors["net.w0"][1] += 1
    save_file(tensors, path, metadata)

    with pytest.raises(ValueError, match="holds one that is damaged"):
        make("ditto").restore(tmp_path)
