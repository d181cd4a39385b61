"""Tests that need a GPU: all of this folder are skipped, with the reason, where torch
sees none or the CUDA kernels are not built."""

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
