"""Damaged files are refused, or give what was written.

A file may be altered, cut off or exchanged on its way. Where a digest protects it
(checkpoints), nothing else is ever read. Without a digest (records, models of other
packages), a value may have changed, but the error is always pflcore's own.
"""

import copy
import io
import json
import os
import pickle
import shutil
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from entry_points import sentence
from hypothesis import example, given
from hypothesis import strategies as st
from parts.results import N, a_long_run, a_run, line, write
from small import equals
from ugly import randn

from bench.papers.runs import load_states
from examples import examples
from pflcore import pack
from pflcore.lab.results.table import table
from pflcore.simulation import checkpoint
from pflcore.simulation.record import read

HOW = ["alter", "cut", "insert", "remove", "exchange", "double", "empty"]
damages = st.tuples(
    st.sampled_from(HOW),
    st.floats(0, 1, exclude_max=True),
    st.floats(0, 1, exclude_max=True),
    st.integers(1, 255),
)


def damaged(before, damage):
    """The bytes with one change, at one place or between two places."""
    kind, one_place, other_place, byte = damage
    i, j = sorted((int(one_place * len(before)), int(other_place * len(before))))
    half = (j - i) // 2
    return {
        "alter": before[:i] + bytes([before[i] ^ byte]) + before[i + 1 :],
        "cut": before[:i],
        "insert": before[:i] + bytes([byte]) * (byte % 9 + 1) + before[i:],
        "remove": before[:i] + before[j:],
        # Two neighbouring blocks change places.
        "exchange": before[:i]
        + before[i + half : j]
        + before[i : i + half]
        + before[j:],
        "double": before[:j] + before[i:],
        "empty": b"",
    }[kind]


def one_sentence(error):
    text = str(error)
    return "\n" not in text and text.endswith(".") and len(text) > 20


def refused_or(read, words):
    """The result of `read()`, or None where it refuses in one sentence.

    The sentence has these words.
    """
    try:
        return read()
    except ValueError as e:
        assert one_sentence(e) and words in str(e)


@contextmanager
def damaged_file(path, damage):
    """Damages a file for the block inside, and restores it afterwards."""
    before = path.read_bytes()
    path.write_bytes(damaged(before, damage))
    try:
        yield
    finally:
        path.write_bytes(before)


# checkpoints ----------------------------------------------------------------
TENSORS = {
    "x": torch.arange(7.0),
    "own": randn(0, 3, 4, dtype=torch.float32),
    "n": torch.tensor([3, 1]),
}
FACTS = {"round": 3, "seed": 0, "loss": [0.25, float("nan")], "name": "waffle"}


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kept")
    checkpoint.save(folder, TENSORS, FACTS)
    return folder


@examples(200)
@given(damage=damages)
def test_a_damaged_checkpoint_is_refused_or_is_what_it_was(kept, damage):
    with damaged_file(kept / checkpoint.FILE_NAME, damage):
        content = refused_or(lambda: checkpoint.load(kept), "damaged")
    if content is not None:
        tensors, facts = content
        assert repr({k: facts[k] for k in FACTS}) == repr(FACTS)
        equals(tensors, TENSORS)


def test_a_flipped_byte_of_a_tensor_is_refused(kept):
    """The tensors are the end of the file."""
    path = kept / checkpoint.FILE_NAME
    before = path.read_bytes()
    length = sum(tensor.nbytes for tensor in TENSORS.values())
    try:
        for place in range(len(before) - length, len(before)):
            path.write_bytes(flipped(before, place))
            with sentence("checkpoint: .* holds one that is damaged"):
                checkpoint.load(kept)
    finally:
        path.write_bytes(before)


def test_a_changed_fact_is_refused(kept):
    path = kept / checkpoint.FILE_NAME
    before = path.read_bytes()
    path.write_bytes(before.replace(b"waffle", b"baffle"))
    try:
        with sentence("checkpoint: .* holds one that is damaged"):
            checkpoint.load(kept)
    finally:
        path.write_bytes(before)


def flipped(data, place):
    """The bytes with one bit of one byte turned."""
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


# records --------------------------------------------------------------------
@pytest.fixture(scope="module")
def record(tmp_path_factory):
    path = tmp_path_factory.mktemp("record") / "record.jsonl"
    return write(path, [*a_long_run(), {"stopped": "It was enough."}])


@examples(200)
@given(damage=damages)
def test_a_damaged_record_is_read_as_far_as_it_goes(record, damage):
    with damaged_file(record, damage):
        runs = read(record)
    for run in runs:
        assert run.rounds_played >= 0 and len(run.rounds) <= 9
    if damage[0] == "cut":
        # A killed run leaves such a record.
        assert len(runs) <= 1 and all(table([r]) for r in runs)
        for r in (r for run in runs for r in run.rounds):
            want = a_long_run()[1]["eval"]["loss"]
            assert r["eval"]["loss"] == [None if v != v else v for v in want]


NO_LINES = """\
[1, 2]
7
{"header": [1]}
{"header": null}
{"round": "three"}
{"round": 2, "eval": 5}
{"stopped": 7}
{"samples": 5}
"""


@pytest.mark.parametrize("line", [*NO_LINES.splitlines(), '{"a":' * 50000])
def test_a_line_that_is_no_line_of_a_record_costs_only_itself(record, tmp_path, line):
    shutil.copytree(record.parent, tmp_path, dirs_exist_ok=True)
    with open(tmp_path / "record.jsonl", "a") as file:
        file.write(line + "\n")
    (run,) = read(tmp_path / "record.jsonl")
    assert [r["round"] for r in run.rounds] == [
        1,
        2,
    ] and run.stopped == "It was enough."


HEADER = a_run(rounds=0)[0]["header"] | {
    "rounds": 3,
    "size": [5] * N,
    "options": {"k": 2},
    "facts": {"held out for validation": 0.5},
    "adversary": {"attack": "noise", "clients": [1]},
    "eval_split": "test",
}


def whole_record():
    """Lines of a record with everything that is read of one."""
    round_entries = {
        "relative_update_norm": [1.0, 2.0, None, 30.0],
        "clipped": [1],
        "void": False,
        "seconds": 0.1,
    }
    rounds = [line(r, [0.5] * N, **round_entries) for r in (1, 2, 3)]
    rounds = json.loads(json.dumps(rounds, default=lambda tensor: tensor.tolist()))
    rounds[1]["report"] = {"weights": [[0.25] * N] * N}
    rounds[2]["report"] = {"index": [[0, 1]], "weight": [[0.5, 0.5]], "rows": [2]}
    return [
        {"header": copy.deepcopy(HEADER)},
        *rounds,
        {"stopped": "It was enough.", "unfinished": True},
    ]


def test_a_number_in_a_line_asks_for_no_memory(tmp_path):
    """A huge client number in a line allocates no memory.

    The header that would give the number of clients is lost.
    """
    lines = whole_record()[3:]
    lines[0]["report"]["index"] = [[0, 10**9]]
    (run,) = read(write(tmp_path / "r.jsonl", lines))
    assert table([run])
    with sentence(
        "report.index: expected numbers whose matrix has up to 100,000,000 entries"
    ):
        run.weights()


def test_a_bad_file_costs_a_folder_only_itself(tmp_path):
    write(tmp_path / "a.jsonl", whole_record())
    (tmp_path / "b.jsonl").mkdir()
    os.mkfifo(tmp_path / "c.jsonl")
    (tmp_path / "d.jsonl").write_bytes(b"\x00\xff" * 100 + b"\n{}\n")
    write(tmp_path / "e.jsonl", whole_record())
    with pytest.warns(UserWarning, match=r"d.jsonl: 1 damaged line\(s\) .*\(1\)"):
        assert [len(run.rounds) for run in read(tmp_path)] == [3, 3]


# models ---------------------------------------------------------------------
def Array(data):
    """Flower's Array of these bytes."""
    flower_array = pytest.importorskip("flwr.app").Array
    return flower_array(dtype="float32", shape=(3, 4), stype="numpy.ndarray", data=data)


def npy(array):
    data = io.BytesIO()
    np.save(data, array)
    return data.getvalue()


ROW = np.arange(12, dtype=np.float32).reshape(3, 4)


@examples(300)
@given(damage=damages)
@example(damage=("alter", 0.27, 0.0, 9))
def test_a_damaged_model_is_named_with_its_client(damage):
    whole = npy(ROW)
    models = [{"w": Array(data)} for data in (whole, damaged(whole, damage))]
    packed = refused_or(lambda: pack(models), "client 1")
    assert packed is None or packed.rows.shape == (2, 12)
    assert packed is None or packed.rows[0].tolist() == ROW.ravel().tolist()


@pytest.mark.parametrize(
    "header",
    [
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (-12,), }",
        b"{'descr': '<f4', 'fortran_order': False,",
        b"(" * 60,
    ],
)
def test_headers_that_no_writer_makes(header):
    size = (len(header) + 1).to_bytes(2, "little")
    body = b"\x93NUMPY\x01\x00" + size + header + b"\n" + ROW.tobytes()
    with sentence("client 0: 'w': expected a whole array"):
        pack([{"w": Array(body)}])


class Trap:
    """Object whose pickle touches a file when it is loaded."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (Path.touch, (self.mark,))


def test_a_pickle_is_never_run(tmp_path):
    """No reader runs the code of a pickle.

    The pickles are in a Flower array, an .npz, a checkpoint and a trained state.
    """
    from entry_points import folder

    mark = tmp_path / "ran"
    trap = np.array([Trap(mark)], dtype=object)
    pickle.loads(pickle.dumps(Trap(mark)))
    assert mark.exists()  # the trap works
    mark.unlink()
    with sentence("client 0"):
        pack([{"w": Array(npy(trap))}])
    (tmp_path / "clients").mkdir()
    np.savez(tmp_path / "clients" / "a.npz", x=trap, y=np.zeros(1))
    with sentence(".*expected arrays of numbers", OSError):
        folder(tmp_path / "clients")
    file = tmp_path / "state.pt"
    torch.save({"g": Trap(mark)}, file)
    assert refused_or(lambda: load_states(file), "remove it") is None
    checkpoint.save(tmp_path / "kept", TENSORS, FACTS)
    (tmp_path / "kept" / checkpoint.FILE_NAME).write_bytes(pickle.dumps(Trap(mark)))
    with sentence("checkpoint: "):
        checkpoint.load(tmp_path / "kept")
    assert not mark.exists()


@examples(100)
@given(damage=damages)
def test_damaged_states_of_a_grid_are_one_sentence(damage, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "state.pt"
    torch.save({"g": dict(TENSORS), "round": 3}, path)
    path.write_bytes(damaged(path.read_bytes(), damage))
    saved = refused_or(lambda: load_states(path), "remove it")
    assert saved is None or isinstance(saved, dict)
