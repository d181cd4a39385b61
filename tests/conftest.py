"""Two suites: `pytest` runs the quick one, `pytest --suite deep` what is slow or wide,
`--suite all` both.

`@pytest.mark.deep("reason")` puts a test, or one of its parameters, into the deep
suite; tests whose examples hypothesis draws run in both, with 15 examples in the quick
one. Examples are the same on every run and every machine. A test has one torch thread
unless it asks. Ctrl-C is answered as at a terminal, also where a shell that runs the
tests in the background has them ignore it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from examples import QUICK

ROOT = Path(__file__).parent.parent
# bench; last, so that the pflcore that is tested is the one that is installed
sys.path.append(str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start

from pflcore.ops import _library as library  # noqa: E402
from pflcore.ops import reference  # noqa: E402

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

DEEP = 60  # examples
for name, count in {"fast": QUICK, "deep": DEEP, "all": DEEP}.items():
    still = {"derandomize": True, "deadline": None, "database": None}
    slow = [HealthCheck.too_slow]
    settings.register_profile(
        name, **still, max_examples=count, suppress_health_check=slow
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    which = "which tests: see tests/conftest.py"
    parser.addoption(
        "--suite", choices=("fast", "deep", "all"), default="fast", help=which
    )
    idle = "a skip that this machine does not explain is a failure"
    parser.addoption("--no-idle-skips", action="store_true", help=idle)


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile(config.getoption("--suite"))
    torch.set_num_threads(1)


def pytest_runtest_setup(item: pytest.Item) -> None:
    # what a test draws does not depend on those before it; hypothesis does so for its
    # own
    torch.manual_seed(0)
    grouped = "@" in item.nodeid or not getattr(item.config.option, "loadgroup", False)
    assert grouped or item.path.stem not in ONE_PROCESS, "xdist does not see the groups"


# what they compile or start is shared by their tests
ONE_PROCESS = {"test_archives", "test_distributed", "test_kernels", "test_sanitize"}


def senseless(item):
    """`@pytest.mark.unless(lambda engine, model: ...)` leaves out combinations of
    parameters that mean nothing."""
    return any(
        mark.args[0](
            *map(item.callspec.params.get, inspect.signature(mark.args[0]).parameters)
        )
        for mark in item.iter_markers("unless")
    )


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups after it
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    suite, kept, left = config.getoption("--suite"), [], []
    for item in [i for i in items if not senseless(i)]:
        if item.path.stem in ONE_PROCESS:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
        deep = item.get_closest_marker("deep")
        if deep is not None and not (deep.args and isinstance(deep.args[0], str)):
            raise pytest.UsageError(
                f"{item.nodeid}: @pytest.mark.deep needs a reason in words"
            )
        drawn = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
        wanted = suite == "all" or (
            deep is None if suite == "fast" else deep is not None or drawn
        )
        (kept if wanted else left).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left)


# why a test may be skipped, and whether this machine is of that kind

DATA = os.environ.get("PFLCORE_DATA")
LACKS = {  # a word in the reason of a skip -> whether it is so
    "GPU": not torch.cuda.is_available(),
    "kernels": library.kernels is None,
    "C++ compiler": shutil.which(os.environ.get("CXX", "c++").split()[0]) is None,
    "PFLCORE_DATA": DATA is None
    or not all(
        (Path(DATA) / name).is_dir() for name in ("mnist", "fashion_mnist", "school")
    ),
    "/proc": not Path("/proc/self/clear_refs").exists(),
    "chromium": not any(
        map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
    ),
    "POSIX": os.name == "nt",
    "Gloo": not (
        torch.distributed.is_available() and torch.distributed.is_gloo_available()
    ),
}


def explained(why: str) -> bool:
    """A package that is not installed (what `pytest.importorskip` says of it), or what
    else is in the table."""
    module = re.search(r"could not import '(\w+)", why)
    if module:
        return importlib.util.find_spec(module[1]) is None
    return any(lacking for word, lacking in LACKS.items() if word in why)


_idle: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if (
        report.skipped
        and not hasattr(report, "wasxfail")
        and isinstance(report.longrepr, tuple)
    ):
        why = report.longrepr[2]
        if not explained(why):
            _idle.append(f"{report.nodeid}: {why}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    whole = not hasattr(session.config, "workerinput")
    if _idle and whole and session.config.getoption("--no-idle-skips"):
        session.exitstatus = 1
        said = session.config.get_terminal_writer()
        said.line("\nskipped, and this machine does not explain it:")
        for line in _idle:
            said.line(line)


# what may run the ops: the instruction sets of this machine, the best one first, and
# the references


def paths() -> list[str]:
    before = library.cpu_isa()
    here = [
        name for name in ("avx512", "avx2", "plain") if library.cpu_isa(name) == name
    ]
    library.cpu_isa(before)
    return [*here, "references"]


BEST, *OTHERS = paths()  # those beside the best one are for the deep suite
EACH = [
    BEST,
    *(pytest.param(n, marks=pytest.mark.deep("another path")) for n in OTHERS),
]


@contextlib.contextmanager
def on_references() -> Iterator[None]:
    """The ops run their references, although the kernels are loaded."""
    overrides = torch.library.Library("pflcore", "IMPL")
    for name, function in vars(reference).items():
        if callable(function):
            overrides.impl(name, function, "CPU", allow_override=True)
    try:
        yield
    finally:
        overrides._destroy()


@contextlib.contextmanager
def on_path(name: str) -> Iterator[str]:
    """The ops run this path of the kernels, or their references."""
    before, threads = library.cpu_isa(), torch.get_num_threads()
    beside = name == "references" and before is not None
    with on_references() if beside else contextlib.nullcontext():
        try:
            if not beside:
                library.cpu_isa(name)
            yield name
        finally:
            torch.set_num_threads(threads)
            library.cpu_isa(before)


@pytest.fixture(params=EACH)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every path of the kernels, and the references beside them."""
    with on_path(request.param) as name:
        yield name


@pytest.fixture(params=EACH[:-1] or [BEST])
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every path of the kernels; one thread, unless the test asks."""
    if library.kernels is None:
        pytest.skip("the kernels are not loaded")
    with on_path(request.param) as name:
        yield name
