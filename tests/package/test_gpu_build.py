"""`make gpu` builds without a package registry.

It uses the torch and the CUDA compiler of the machine.
"""

import os
import subprocess
import sys

import pytest
import torch
from places import ROOT

pytestmark = [
    pytest.mark.deep("subprocesses"),
    pytest.mark.skipif(
        not (ROOT / ".ci" / "cuda_build").exists(), reason="no checkout"
    ),
]
OPTIONS = {"cwd": ROOT, "capture_output": True, "text": True}


@pytest.mark.parametrize("step", ["", "build", "tests", "runs", "sanitize", "bench"])
def test_another_python_is_taken_as_it_is(step):
    target = f"gpu-{step}".strip("-")
    words = ["make", "-n", target, "GPU_PYTHON=/usr/bin/mine", "LOGS=there"]
    # Inside another make, make prints the folders it enters as well.
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("MAKE")
    }

    out = subprocess.run(words, check=True, env=environment, **OPTIONS).stdout

    assert out.split() == ['LOGS="there"', ".ci/gpu", "/usr/bin/mine", *step.split()]


def stand_in(tmp_path, script):
    """A shell script that stands for the Python interpreter."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    return python


def run_gpu(python, tmp_path, *steps):
    logs = {**os.environ, "LOGS": str(tmp_path / "logs")}
    words = [".ci/gpu", python, *steps]
    return subprocess.run(words, env=logs, check=False, **OPTIONS)


def test_missing_module_is_named_before_anything_is_built(tmp_path):
    python = stand_in(tmp_path, "echo no module named annotated_types >&2; exit 1")

    run = run_gpu(python, tmp_path)

    assert run.returncode == 1 and "annotated_types" in run.stderr
    assert run.stdout.endswith(
        "-m pip install annotated-types safetensors numpy pytest hypothesis\n"
    )
    assert not (tmp_path / "logs").exists()


def test_steps_go_on_after_one_that_fails(tmp_path):
    """Steps go on after one that fails, and leave their output."""
    python = stand_in(
        tmp_path, 'case "$*" in *test_gpu_ops*) echo broken; exit 1 ;; esac'
    )

    run = run_gpu(python, tmp_path, "tests", "bench")

    assert run.returncode == 1 and run.stdout.endswith("gpu: failed: tests\n")
    assert "gpu: bench passed" in run.stdout
    assert (tmp_path / "logs" / "tests.log").read_text() == "broken\n"


@pytest.mark.parametrize("step", ["tests", "bench"])
def test_without_a_card_a_step_says_so(tmp_path, step):
    if torch.cuda.is_available():
        pytest.skip("this machine has a card")

    run = run_gpu(sys.executable, tmp_path, step)

    assert run.returncode == 1
    assert f'sees no GPU here; the step "{step}" was not run.' in run.stdout


def test_unknown_step_is_refused(tmp_path):
    run = run_gpu(stand_in(tmp_path, ""), tmp_path, "benhc")

    assert run.returncode == 1 and 'there is no step "benhc"' in run.stdout


@pytest.mark.parametrize("cuda", ["12.8", "13.2"])
def test_without_a_compiler_there_is_a_sentence_and_pip_is_not_asked(tmp_path, cuda):
    script = f"""case "$*" in
  *torch.version.cuda*) echo {cuda} ;;
  *cuda_home*) echo ;;
  *pip*) touch {tmp_path}/asked ;;
esac"""
    python = stand_in(tmp_path, script)
    offline = {**os.environ, "PIP_NO_INDEX": "1"}
    run = subprocess.run([".ci/cuda_build", python], env=offline, **OPTIONS)
    assert run.returncode == 1 and not (tmp_path / "asked").exists()
    assert run.stdout.endswith(
        f"has a torch of CUDA {cuda}, and no CUDA {cuda[:2]} compiler was found: "
        "install that "
        "toolkit and set CUDA_HOME to it.\n"
    )
