"""Ops on matrices over three processes give the numbers of one process.

No rank waits for another without end. The checks of a rank are in rank.py.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from places import ROOT

from pflcore.interop import distributed

dist = pytest.importorskip("torch.distributed")
gloo = dist.is_available() and dist.is_gloo_available()
pytestmark = [
    pytest.mark.skipif(not gloo, reason="this torch has no Gloo"),
    pytest.mark.deep("several processes"),
]

ENVIRONMENT = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


def test_every_law_of_a_rank_holds_on_every_one(tmp_path):
    """Every check of rank.py holds on every rank."""
    words = [sys.executable, Path(__file__).with_name("rank.py"), tmp_path / "store"]
    options = {"env": ENVIRONMENT, "stderr": subprocess.PIPE, "text": True}
    errors = []
    processes = [subprocess.Popen([*words, str(rank)], **options) for rank in range(3)]
    try:
        errors = [process.communicate(timeout=400)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    codes = [process.returncode for process in processes]
    assert codes == [0, 0, 9], "\n".join(errors)[-9000:]


def test_without_a_group():
    with pytest.raises(ValueError, match="init_process_group"):
        distributed.pairwise_sqdist(torch.ones(2, 2))


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
