"""`make gpu` where no package registry is: with the torch and the CUDA compiler that are there."""

import os
import subprocess

import pytest
from places import ROOT

pytestmark = [
    pytest.mark.deep("subprocesses"),
    pytest.mark.skipif(not (ROOT / ".ci" / "cuda_build").exists(), reason="no checkout"),
]
HOW = {"cwd": ROOT, "capture_output": True, "text": True}


def test_another_python_is_taken_as_it_is():
    words = ["make", "-n", "gpu", "GPU_PYTHON=/usr/bin/mine"]
    said = subprocess.run(words, check=True, **HOW).stdout
    assert ".ci/cuda_build /usr/bin/mine" in said and "/usr/bin/mine -m pytest tests/gpu" in said
    assert "pip" not in said and ".venv" not in said


@pytest.mark.parametrize("cuda", ["12.8", "13.2"])
def test_without_a_compiler_there_is_a_sentence_and_pip_is_not_asked(tmp_path, cuda):
    python = tmp_path / "python"
    python.write_text(f"""#!/bin/sh
case "$*" in
  *torch.version.cuda*) echo {cuda} ;;
  *cuda_home*) echo ;;
  *pip*) touch {tmp_path}/asked ;;
esac
""")
    python.chmod(0o755)
    offline = {**os.environ, "PIP_NO_INDEX": "1"}
    run = subprocess.run([".ci/cuda_build", python], env=offline, **HOW)
    assert run.returncode == 1 and not (tmp_path / "asked").exists()
    assert run.stdout.endswith(
        f"has a torch of CUDA {cuda}, and no CUDA {cuda[:2]} compiler was found: install that "
        "toolkit and set CUDA_HOME to it.\n"
    )
