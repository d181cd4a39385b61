"""Matrices over three processes (rank.py) against the ops in one: the same numbers, no rank that
waits for another for ever."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from interop.rank import COUNTS, DTYPES, WIDTHS, N, P, matrix, weights
from places import ROOT
from torch.testing import assert_close

import pflcore
from pflcore.interop import distributed

dist = pytest.importorskip("torch.distributed")
gloo = dist.is_available() and dist.is_gloo_available()
pytestmark = [
    pytest.mark.skipif(not gloo, reason="this torch has no Gloo"),
    pytest.mark.deep("several processes"),
]

WORLD = 3
ENVIRONMENT = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each rank got."""
    folder = tmp_path_factory.mktemp("ranks")
    program = Path(__file__).with_name("rank.py")
    options = {"env": ENVIRONMENT, "stderr": subprocess.PIPE, "text": True}
    words = [[sys.executable, program, folder, str(rank), str(WORLD)] for rank in range(WORLD)]
    said, running = [], [subprocess.Popen(one, **options) for one in words]
    try:
        said = [process.communicate(timeout=400)[1] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0, 9], "\n".join(said)[-3000:]
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


def same(ranks, key):
    """What all ranks have alike, to the last bit."""
    first = ranks[0][key]
    for other in ranks:
        assert torch.equal(other[key].nan_to_num(-1.0), first.nan_to_num(-1.0)), key
    return first


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_become_columns_and_come_back(ranks, dtype):
    x = matrix(dtype)
    assert torch.equal(torch.cat([r["columns", dtype] for r in ranks], 1), x)
    # whole groups of 160
    assert [r["columns", dtype].shape[1] for r in ranks] == [800, 800, P - 1600]
    wanted = {"chosen": x.split(WIDTHS, 1), "back": x.split(COUNTS), "equal rows": x.split(3)}
    for key, parts in wanted.items():
        assert all(torch.equal(r[key, dtype], p) for r, p in zip(ranks, parts, strict=True)), key


@pytest.mark.parametrize("dtype", DTYPES)
def test_distances_are_those_of_one_process(ranks, dtype):
    """Rounding of float64 where a float32 sum meets the same columns; 1e-6, the op's own, where
    shards cut through them."""
    x, want = matrix(dtype), pflcore.pairwise_sqdist(matrix(dtype))
    off = 1e-14 if dtype == torch.float64 else 2e-6
    for key, rtol in (("distances", 1e-14), ("of odd shards", off)):
        got = same(ranks, (key, dtype))
        assert_close(got, want, rtol=rtol, atol=0)
        assert torch.equal(got, got.T) and (got.diagonal() == 0).all()
    want = pflcore.pairwise_sqdist(x, matrix(dtype, 1)[:5])
    assert_close(same(ranks, ("of two", dtype)), want, rtol=2e-6, atol=0)


def test_distances_of_the_ugly(ranks):
    """NaN in one rank's columns, equal clients, none at all, a tensor that requires grad."""
    got = same(ranks, "with NaN")
    nan = torch.zeros(N, N, dtype=torch.bool)
    nan[2], nan[:, 2], nan[2, 2] = True, True, False
    assert torch.equal(got.isnan(), nan) and got[4, 5] == 0 == got[5, 4] and got[2, 2] == 0
    assert same(ranks, "no clients").shape == (0, 0) and not any(r["no gradient"] for r in ranks)


@pytest.mark.parametrize("dtype", DTYPES)
def test_mixes_are_bit_for_bit_those_of_one_process(ranks, dtype):
    x, (weight, index) = matrix(dtype), weights()
    mixes = {
        "mix": pflcore.aggregate(x, weight, base=x[0]),
        "sparse mix": pflcore.aggregate(x, weight[:, :2], index, lr=0.5),
    }
    for key, want in mixes.items():
        assert torch.equal(torch.cat([r[key, dtype] for r in ranks], 1), want)


@pytest.mark.parametrize("dim", [0, 1])
def test_dtensors(ranks, dim):
    x, weight = matrix(), weights()[0]
    want = pflcore.pairwise_sqdist(x)
    assert_close(same(ranks, ("DTensor", dim)), want, rtol=2e-6, atol=0)
    assert torch.equal(same(ranks, ("DTensor mix", dim)), pflcore.aggregate(x, weight))


SAID = {  # on every rank, of a mistake on one or between them
    "number": r"pairwise_sqdist: the call must be .*a with 7 rows of .*a with 6 rows .*on rank 2",
    "dtype": r".*torch.float64 on rank 2",
    "text": r".*a must be a tensor, got 'text' of type str",
    "b": r".*b must be of (1|1900|102) columns like a, got",
    "one b": r".*b with 7 rows of torch.float32 on rank 2",
    "calls": r".*to_rows, columns with 7 rows of torch.float32 on rank 2",
    "P": r".*rows with 2002 columns of torch.float32 on rank 2",
    "width": r"to_columns: width must be 2003 in all over the ranks, got 3 \+ 3 \+ 3",
    "one width": r".*a width on rank 2",
    "bad width": r".*width must be a whole number, at least 0, got -1",
    "meta": r".*backend \(.*\) can send it from, got .* on meta",
    "replicated": r".*a must be Shard\(0\) or Shard\(1\) of \[N, P\] on a 1-D mesh, got ",
    "no group": r".*group must be a process group .*: start it by torchrun .*, got 'text' of type",
}


@pytest.mark.parametrize("key", SAID)
def test_a_mistake_is_one_sentence_on_every_rank(ranks, key):
    for rank in ranks:
        said = rank[key]
        assert "\n" not in said and said.endswith(".") and ". " not in said, said
        assert re.match(rf"(TypeError|ValueError): {SAID[key]}", said), said
    # and nothing is out of step afterwards
    assert torch.equal(same(ranks, "still"), same(ranks, ("of odd shards", torch.float32)))


def test_a_group_of_some_ranks(ranks):
    assert ranks[0]["group"] == ranks[1]["group"] == "nothing"
    assert "group must be a process group that this rank belongs to" in ranks[2]["group"]


def test_a_rank_that_dies_ends_the_others(ranks):
    for rank in ranks[:2]:
        words = "RuntimeError: pairwise_sqdist: another rank has ended or did not answer"
        assert rank["death"].startswith(words) and "\n" not in rank["death"], rank["death"]


def test_without_a_group():
    with pytest.raises(ValueError, match=r"start it by torchrun .* got None of type NoneType"):
        distributed.pairwise_sqdist(matrix())


def test_the_example_under_torchrun(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node=2", str(ROOT / "examples" / "sharded.py")]
    options = {"capture_output": True, "text": True, "timeout": 400}
    run = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, **options)
    assert run.returncode == 0, run.stderr[-3000:]
    sent = "rank 0 sent 4.8 MB of rows, 2208 bytes of distances, 4.8 MB of rows back"
    assert "2 ranks, 24 clients" in run.stdout and sent in run.stdout
    off = [float(number) for number in re.findall(r"by ([\d.e+-]+),", run.stdout)]
    assert len(off) == 2 and off[0] < 1e-14 and off[1] < 1e-6
