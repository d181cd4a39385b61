"""Runs on several ranks have the bits of a run in one process."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from parts.forks import run_ranks
from parts.rank_resume import resume_all
from parts.ranks import play_all
from places import ROOT

from pflcore import ALGORITHMS

dist = pytest.importorskip("torch.distributed")
has_gloo = dist.is_available() and dist.is_gloo_available()
pytestmark = pytest.mark.skipif(not has_gloo, reason="this torch has no Gloo")

PROGRAM = ROOT / "tests" / "parts" / "ranks.py"
ENVIRONMENT = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
ENVIRONMENT["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests"), str(ROOT)])
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def run_torchrun(count, *words):
    """The completed process of torchrun with `count` ranks."""
    command = [*TORCHRUN, f"--nproc-per-node={count}", *map(str, words)]
    process = subprocess.Popen(
        command,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, errors = process.communicate(timeout=300)
    except BaseException:
        process.terminate()  # torchrun ends its ranks
        process.communicate(timeout=60)
        raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def digests_of_ranks(count, cases, folder, torchrun=False):
    """The digests of the cases on each of `count` ranks."""
    words = (PROGRAM, json.dumps(cases), folder)
    if torchrun:
        run = run_torchrun(count, *words)
        assert run.returncode == 0, run.stderr[-5000:]
    else:
        assert run_ranks(count, *words) == [0] * count
    files = [Path(folder, f"digests-{rank}.json") for rank in range(count)]
    return [json.loads(file.read_text()) for file in files]


def without_checkpoints(digests):
    """The digests that every rank has: the first one alone writes checkpoints."""
    return {k: v for k, v in digests.items() if not k.startswith("checkpoint")}


def assert_equal_digests(count, cases, folder, torchrun=False):
    """Asserts that every rank shared the runs, and has the digests of this process."""
    want = play_all(cases)
    by_rank = digests_of_ranks(count, cases, folder, torchrun)
    for rank, got in enumerate(by_rank):
        *numbers, bytes_received = got.pop("ranks")
        assert numbers == [rank, count] and bytes_received > 0
        assert got.keys() == want.keys()
        for name, digests in want.items():
            expected = without_checkpoints(digests) if rank else digests
            assert got[name] == expected, f"rank {rank}, {name}"


QUICK_CASES = [
    {"algorithm": "fedavg", "model": "batch_norm", "engine": "vmap"},
    {
        "algorithm": "scaffold",
        "model": "plain",
        "engine": "loop",
        "sampling": "parts.ranks:draw_five",
        "training": {"local_optimizer": "adamw"},
    },
    {
        "algorithm": "ditto",
        "model": "plain",
        "engine": "vmap",
        "without_training": [5],
        "training": {"steps": "parts.ranks:draw_steps", "augment": "parts.ranks:noise"},
    },
    {"algorithm": "feddwa", "participation": 0.15},  # one client: a rank has none
    {"algorithm": "l2c", "participation": 1.0},
    {"algorithm": "waffle", "bad_clients": [2], "clip": 0.5},
    {"algorithm": "fedavg", "bad_clients": list(range(7))},  # void rounds
]


@pytest.mark.deep("it takes seconds")
def test_two_ranks_have_the_bits_of_one_process(tmp_path):
    assert_equal_digests(2, QUICK_CASES, tmp_path, torchrun=True)


ALL_ALGORITHMS = [
    {"algorithm": name, "participation": 0.6, "clip": 0.4, "rounds": 2}
    for name in ALGORITHMS
]
OTHER_SHAPES = [
    {"algorithm": name, "rounds": 2, **shape}
    for name in ("scaffold", "apfl", "feddwa", "fedfomo", "qfedavg", "hypcluster")
    for shape in (
        {"model": "plain", "engine": "vmap"},
        {"model": "batch_norm", "engine": "loop"},
    )
]


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(ALL_ALGORITHMS, marks=pytest.mark.deep("three processes")),
        pytest.param(OTHER_SHAPES, marks=pytest.mark.long("three processes")),
    ],
    ids=["all algorithms", "other shapes"],
)
def test_three_ranks_have_the_bits_of_one_process(cases, tmp_path):
    assert_equal_digests(3, cases, tmp_path)


RESUME = PROGRAM.with_name("rank_resume.py")
RESUMED_CASES = [
    {"algorithm": "feddwa", "rounds": 6},
    {"algorithm": "scaffold", "rounds": 6, "model": "batch_norm", "engine": "vmap"},
]


def resumed_digests(count, folder):
    """What each of `count` ranks had when the cases had gone on from the folder."""
    files = [Path(folder, f"resumed-{rank}.json") for rank in range(count)]
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.deep("three processes")
def test_fewer_ranks_take_up_a_run_of_more(tmp_path):
    want = resume_all(RESUMED_CASES, tmp_path / "whole")

    for count, after in ((3, 2), (2, 4)):
        cases = [case | {"stop_after": after} for case in RESUMED_CASES]
        codes = run_ranks(count, RESUME, json.dumps(cases), tmp_path)
        assert codes == [0] * count
        for rank in resumed_digests(count, tmp_path):
            assert [run["rounds"] for run in rank] == [after] * len(cases)
    got = resume_all(RESUMED_CASES, tmp_path)

    assert got == want and all(run["rounds"] == 6 for run in want)


@pytest.mark.long("six processes")
def test_torchrun_restarts_a_run_whose_rank_was_killed(tmp_path):
    case = {"algorithm": "feddwa", "rounds": 6, "participation": 0.5}
    want = resume_all([case], tmp_path / "whole")

    cases = [case | {"kill_after": 3}]
    run = run_torchrun(3, "--max-restarts=1", RESUME, json.dumps(cases), tmp_path)
    assert run.returncode == 0, run.stderr[-5000:]
    by_rank = resumed_digests(3, tmp_path)

    assert (tmp_path / "killed").exists()
    assert by_rank == [want] * 3


FAULTS = PROGRAM.with_name("rank_faults.py")
# The ranks hear of each of these, and go on to the next.
TOLD_FAULTS = {
    "data": "ValueError: ranks: rank 1 would play another run than rank 0: data is",
    "weights": "rank 1 would play another run than rank 0: initial_weights is",
    "options": "participation is 1.0 on rank 0 and 0.5 on rank 1; give all ranks the",
    "callback": "rank 0 of 3 failed: OSError: no room for the record",
    "stop": None,
    "interrupt": None,
    "model": "rank 1 of 3 failed: ValueError: the layer is too hot",
    "memory": "MemoryError: tried to allocate 20.00 GiB",
    "server": "MemoryError: Tried to allocate 3.00 GiB",
}


def faults_of_ranks(ranks, faults, folder, count=3):
    """The faults as some of `count` ranks saw them, and all exit codes."""
    codes = run_ranks(count, FAULTS, folder, *faults)
    files = [Path(folder, f"faults-{rank}.json") for rank in ranks]
    return [json.loads(file.read_text()) for file in files], codes


faults_of_two_ranks = pytest.mark.xdist_group("two ranks")  # one start for all tests


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """What each of two ranks saw of four faults."""
    folder = tmp_path_factory.mktemp("faults")
    faults = ("options", "server", "draws", "place")
    seen, codes = faults_of_ranks(range(2), faults, folder, count=2)
    assert codes == [0, 0]
    return seen


@pytest.mark.deep("it takes seconds")
@faults_of_two_ranks
def test_ranks_with_other_options_play_no_round(two_ranks):
    for faults in two_ranks:
        assert "participation is 1.0 on rank 0 and 0.5 on" in faults["options"]["error"]
        assert faults["options"]["rounds"] is None


@faults_of_two_ranks
def test_no_rank_commits_a_round_in_which_another_failed(two_ranks):
    for faults in two_ranks:
        assert faults["server"]["rounds"] == 2
        assert faults["server"]["error"] == "MemoryError: Tried to allocate 3.00 GiB"


@faults_of_two_ranks
def test_the_first_rank_draws_the_cohort_for_all(two_ranks):
    for faults in two_ranks:
        assert faults["draws"]["error"] is None
        assert faults["draws"]["cohorts"] == [[0]] * 4
    assert two_ranks[0]["draws"]["digest"] == two_ranks[1]["draws"]["digest"]


@faults_of_two_ranks
def test_ranks_at_other_places_of_the_program_are_told(two_ranks):
    for faults in two_ranks:
        error = faults["place"]["error"]
        assert error.startswith("RankError: rank ")
        assert error.endswith("let all ranks run the same program.")


@pytest.mark.deep("three processes")
def test_an_error_of_one_rank_ends_all_alike(tmp_path):
    seen, codes = faults_of_ranks(range(3), TOLD_FAULTS, tmp_path)

    assert codes == [0, 0, 0]
    for fault, words in TOLD_FAULTS.items():
        first, second, third = (faults[fault] for faults in seen)
        assert first["digest"] == second["digest"] == third["digest"], fault
        assert first["rounds"] == second["rounds"] == third["rounds"], fault
        if words is None:
            assert first["error"] is second["error"] is third["error"] is None
            assert first["stopped"] == second["stopped"] == third["stopped"], fault
        else:
            assert words in third["error"], fault
            assert third["error"].count("\n") == 0, fault


@pytest.mark.deep("three processes")
def test_a_killed_rank_ends_the_others_in_one_sentence(tmp_path):
    seen, codes = faults_of_ranks((0, 2), ["killed"], tmp_path)

    assert codes == [0, -signal.SIGKILL, 0]
    for faults in seen:
        assert faults["killed"]["rounds"] == 2
        assert "another rank has ended" in faults["killed"]["error"]


@pytest.mark.long("a timeout passes")
def test_a_silent_rank_ends_the_others_after_the_timeout(tmp_path):
    seen, _ = faults_of_ranks((0, 2), ["silent"], tmp_path)

    for faults in seen:
        assert faults["silent"]["rounds"] == 2
        assert "silent for longer than the timeout" in faults["silent"]["error"]
