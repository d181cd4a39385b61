"""One hypothesis profile for all tests: the same examples on every run and every machine, no deadlines. And Ctrl-C is answered as at a
terminal, also where a shell that runs the tests in the background has them ignore it."""

import signal
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from places import ROOT

sys.path.append(str(ROOT))  # bench; last, so that the pflcore that is tested is the one that is installed

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile(
    "pflcore", derandomize=True, deadline=None, max_examples=60, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("pflcore")


@pytest.fixture(params=["plain", "avx2", "avx512"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """The test runs on every path of the CPU kernels that this machine has; once where the references run. One thread, unless it asks."""
    import torch

    from pflcore.ops import _library as library

    before, threads = library.isa(), torch.get_num_threads()
    if before is None and request.param != "plain":
        pytest.skip("the references have one path only")
    try:
        if before is not None and library.isa(request.param) != request.param:
            pytest.skip(f"this machine has no {request.param}")
        torch.set_num_threads(1)
        yield "references" if before is None else request.param
    finally:
        torch.set_num_threads(threads)
        if before is not None:
            library.isa(before)
