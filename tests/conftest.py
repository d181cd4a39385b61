"""One hypothesis profile for all tests: the same examples on every run and every machine, no deadlines."""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "pflcore", derandomize=True, deadline=None, max_examples=60, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("pflcore")


@pytest.fixture(params=["plain", "avx2", "avx512"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """The test runs on every path of the CPU kernels that this machine has; once where the references run."""
    from pflcore.ops import library

    c = library._C
    if c is None:
        if request.param != "plain":
            pytest.skip("the references have one path only")
        yield "references"
        return
    before = c.isa()
    if c.set_isa(request.param) != request.param:
        c.set_isa(before)
        pytest.skip(f"this machine has no {request.param}")
    yield request.param
    c.set_isa(before)
