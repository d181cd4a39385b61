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
import re
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
from pflcore.results.record import read
from pflcore.results.table import table
from pflcore.simulation import checkpoint

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
{"round": 2, "eval": {"loss": {"array": 5}}}
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


def put(lines, where, value):
    """Puts a value at "LINE KEY KEY ..." of some lines."""
    at, *keys = [int(key) if key.isdigit() else key for key in where.split()]
    place = lines[at - 1]
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value


ODD_LINES = """\
1 header n | 0 | header.n: expected a whole number
1 header n | 1000000000000 | header.n: expected a whole number
1 header size | [5] | header.size: expected the samples of 4 clients
1 header options | 5 | header.options: expected an object
1 header facts | "x" | header.facts: expected an object
1 header target | 4 | header.target: expected a client
1 header target | -1 | header.target: expected a client
1 header seed | [0] | header.seed: expected a single value
1 header adversary clients | 5 | header.adversary: expected an attack
3 round | 1e300 | round: expected a whole number
3 round | 18446744073709551616 | round: expected a whole number
3 round | true | round: expected a whole number
3 cohort | [0, 4] | cohort: expected clients from 0 to 3
3 cohort | 5 | cohort: expected a list of clients
3 relative_update_norm | ["x"] | relative_update_norm: expected a list of numbers
3 bytes_up | "x" | bytes_up: expected a number of bytes
3 bytes_down | -1 | bytes_down: expected a number of bytes
3 eval loss | [[1], [1, 2], 1, 1] | eval.loss: expected a list of numbers
3 eval loss | 0.5 | eval.loss: expected a list of numbers
3 eval loss | [0.5] | eval: expected lists of one length
3 eval | {"loss": [0.5]} | eval: expected values of 4 clients
3 eval | {"size": [1, 1, 1, 1]} | eval: expected an accuracy or a loss
3 eval | {"loss": [1, 1, 1, 1]} | eval: expected the run's keys and lengths
3 report | 5 | report: expected an object
3 report weights | [[0.5], [0.25, 0.25]] | report.weights: expected a list or matrix
4 report index | [[0, -1]] | report.index: expected the clients of each weight
4 report index | [[0, 1000000000]] | report.index: expected clients from 0 to 3
4 report index | [[0]] | report.index: expected the clients of each weight
4 report rows | [4] | report.rows: expected clients from 0 to 3
4 report rows | [0, 1] | report.rows: expected a client for each row
"""


@pytest.mark.parametrize("row", ODD_LINES.splitlines())
def test_an_odd_line_is_named_and_costs_only_itself(row, tmp_path):
    where, value, message = row.split(" | ")
    lines = whole_record()
    put(lines, where, json.loads(value))
    path = write(tmp_path / "r.jsonl", lines)
    number = where.split()[0]
    want = re.escape(f"{path}: 1 damaged line(s) are left out ({number});")
    with pytest.warns(
        UserWarning, match=f"^{want}.* Line {number}: {re.escape(message)}"
    ):
        (run,) = read(path)
    assert [r["round"] for r in run.rounds] == [
        r for r in (1, 2, 3) if r + 1 != int(number)
    ]
    assert run.stopped == "It was enough." and table([run])


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


ODD = [
    None,
    True,
    -1,
    0,
    2**60,
    10**400,
    1e300,
    float("inf"),
    float("nan"),
    "",
    "x",
    [],
    {},
]
ODD += [[[1], [1, 2]], [1, 2], [-1], [10**9], ["a"], {"a": 1}, {"array": 5}]


def places(value, path=""):
    """Yields the path of keys to every value in a line."""
    keys = (
        value
        if isinstance(value, dict)
        else range(len(value) if isinstance(value, list) else 0)
    )
    for key in keys:
        yield f"{path} {key}".strip()
        yield from places(value[key], f"{path} {key}")


EVERYWHERE = [
    f"{at} {path}"
    for at, one in enumerate(whole_record(), 1)
    for path in places(one)
    if path and "held out" not in path  # this key has spaces
]


@pytest.mark.deep("some 4,000 records")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("where", EVERYWHERE)
def test_any_value_at_any_place_of_a_record_is_no_error(where, tmp_path):
    for value in ODD:
        lines = whole_record()
        put(lines, where, value)
        (tmp_path / "r.jsonl").write_text("\n".join(map(json.dumps, lines)))
        runs = read(tmp_path / "r.jsonl")
        assert table(runs)
        for run in runs:
            assert (
                run.weights() and run.cumulative_bytes() and run.outliers() is not None
            )


def test_a_bad_file_costs_a_folder_only_itself(tmp_path):
    write(tmp_path / "a.jsonl", whole_record())
    (tmp_path / "b.jsonl").mkdir()
    os.mkfifo(tmp_path / "c.jsonl")
    (tmp_path / "d.jsonl").write_bytes(b"\x00\xff" * 100 + b"\n{}\n")
    write(tmp_path / "e.jsonl", whole_record())
    with pytest.warns(
        UserWarning, match=r"d.jsonl: 1 damaged line.* Line 1: expected JSON"
    ):
        assert [len(run.rounds) for run in read(tmp_path)] == [3, 3]


def test_an_earlier_format_is_no_damage(tmp_path):
    """Lines of an earlier format are left out with their own message.

    That format keeps long lists in a separate file, as {"array": [file, offset]}.
    """
    lines = whole_record()
    lines[0]["header"]["size"] = {"array": ["record.arrays", 0]}
    lines[1]["eval"]["loss"] = {"array": ["record.arrays", 1234]}
    path = write(tmp_path / "record.jsonl", lines[:2])
    message = (
        r"2 line\(s\) of an earlier format, .* are left out \(1, 2\); read it with "
        r"the pflcore"
    )
    with pytest.warns(UserWarning, match=message) as warned:
        assert read(path) == []
    assert "damaged" not in str(warned[0].message)


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


@pytest.mark.parametrize("form", ["array", "file"])
@examples(300)
@given(damage=damages)
@example(damage=("alter", 0.27, 0.0, 9))
def test_a_damaged_model_is_named_with_its_client(form, damage, tmp_path_factory):
    def file(i, data):
        path = tmp_path_factory.getbasetemp() / f"{i}.safetensors"
        path.write_bytes(data)
        return path

    def array(i, data):
        return {"w": Array(data)}

    if form == "array":
        whole = npy(ROW)
        model = array
    else:
        save = pytest.importorskip("safetensors.torch").save
        whole = save(
            {k: torch.from_numpy(row) for k, row in zip("abc", ROW, strict=True)}
        )
        model = file
    models = [model(0, whole), model(1, damaged(whole, damage))]
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
