"""Skips the tests of this folder where there is no GPU.

The reason is that torch sees no GPU, or that the CUDA kernels are not built.
"""

from pathlib import Path

import pytest
import torch

from pflcore import ops


def why_not():
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU here"
    if not ops.backend().cuda:
        return f"the CUDA kernels are not built: {ops.backend()}"
    return None


def pytest_collection_modifyitems(items):
    reason = why_not()
    for item in items:
        if reason and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))
