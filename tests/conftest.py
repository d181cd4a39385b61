"""One hypothesis profile for all tests: the same examples on every run and every machine, no deadlines."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "pflcore", derandomize=True, deadline=None, max_examples=60, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("pflcore")
