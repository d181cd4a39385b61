"""The three suites, and the paths of the kernels.

`pytest` runs the quick suite, `pytest --suite deep` the slow and wide tests,
`--suite long` those that take minutes each, and `--suite all` everything.

`@pytest.mark.deep("reason")` and `@pytest.mark.long("reason")` put a test, or one of
its parameters, into the deep or the long suite. `@pytest.mark.deep("reason", one_in=3)`
puts one in three of such parameters into the deep suite, and the others into the long
one. `@pytest.mark.deep("reason", quick=3)` leaves the first of every three parameters
in the quick suite. Tests whose examples hypothesis draws run in the quick and the deep
suite, with 15 examples in the quick one. Examples are the same on every run and every
machine. A test has one torch thread unless it asks for more.

Ctrl-C is answered as at a terminal, even where a background shell makes its programs
ignore it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import inspect
import os
import re
import shutil
import signal
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from examples import QUICK

ROOT = Path(__file__).parent.parent
# For `bench`. It stands last, so that the installed pflcore is tested.
sys.path.append(str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for processes that tests start

from pflcore.ops import _library as library  # noqa: E402

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

DEEP = 60  # examples
SUITES = {"fast": QUICK, "deep": DEEP, "long": DEEP, "all": DEEP}
for name, count in SUITES.items():
    still = {"derandomize": True, "deadline": None, "database": None}
    slow = [HealthCheck.too_slow]
    settings.register_profile(
        name, **still, max_examples=count, suppress_health_check=slow
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    which = "which tests: see tests/conftest.py"
    parser.addoption("--suite", choices=tuple(SUITES), default="fast", help=which)
    idle = "a skip that this machine does not explain is a failure"
    parser.addoption("--no-idle-skips", action="store_true", help=idle)


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile(config.getoption("--suite"))
    torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    # Each collection of garbage would look at all that was imported.
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    # A test's random numbers do not depend on the tests before it. hypothesis does the
    # same for its own numbers. Where no card was used, `torch.manual_seed` notes the
    # stack of calls for each kind of card, which takes longer than many a test.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)
    grouped = "@" in item.nodeid or not getattr(item.config.option, "loadgroup", False)
    assert grouped or item.path.stem not in ONE_PROCESS, "xdist does not see the groups"


# The tests of these files share what they compile or start.
ONE_PROCESS = {"test_archives", "test_distributed", "test_kernels", "test_sanitize"}


def senseless(item):
    """True for a combination of parameters without meaning.

    `@pytest.mark.unless(lambda engine, model: ...)` marks such combinations.
    """
    return any(
        mark.args[0](
            *map(item.callspec.params.get, inspect.signature(mark.args[0]).parameters)
        )
        for mark in item.iter_markers("unless")
    )


def place_of(item):
    """The place of a test among the parameters of its function, from 0.

    Where a function has several lists of parameters, it is the sum of the places in
    them. So no value of a list is always in the same suite.
    """
    places = 0
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0]
        first = names.split(",")[0].strip() if isinstance(names, str) else names[0]
        places += item.callspec.indices[first]
    return places


def suites_of(item):
    """The names of the suites that a test belongs to."""
    for name in ("long", "deep"):
        mark = item.get_closest_marker(name)
        if mark is None:
            continue
        if not (mark.args and isinstance(mark.args[0], str)):
            raise pytest.UsageError(
                f"{item.nodeid}: @pytest.mark.{name} needs a reason in words"
            )
        marks = [*item.iter_markers(name)]
        strides = [m.kwargs.get("quick") for m in marks]
        if all(strides) and place_of(item) % max(strides) == 0:
            return {"fast"}
        one_in = max(m.kwargs.get("one_in", 1) for m in marks)
        # By the name, so that a test is in one suite however it is asked for.
        return {"long" if zlib.crc32(item.nodeid.encode()) % one_in else name}
    drawn = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
    return {"fast", "deep"} if drawn else {"fast"}


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    suite = config.getoption("--suite")
    kept = []
    left = []
    for item in [i for i in items if not senseless(i)]:
        if item.path.stem in ONE_PROCESS:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
        (kept if suite == "all" or suite in suites_of(item) else left).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left)


# reasons of skips, and whether they hold on this machine

DATA = os.environ.get("PFLCORE_DATA")
LACKS = {  # a word in the reason of a skip -> True where it holds
    "GPU": not torch.cuda.is_available(),
    "kernels": library.kernels is None,
    "C++ compiler": shutil.which(os.environ.get("CXX", "c++").split()[0]) is None,
    "/proc": not Path("/proc/self/clear_refs").exists(),
    "chromium": not any(
        map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
    ),
    "POSIX": os.name == "nt",
    "checkout of git": not (shutil.which("git") and (ROOT / ".git").exists()),
    "Gloo": not (
        torch.distributed.is_available() and torch.distributed.is_gloo_available()
    ),
}


def explained(why: str) -> bool:
    """True where this machine explains a skip.

    A package is not installed (`pytest.importorskip` says so), a data set has no folder
    in `PFLCORE_DATA`, or `LACKS` has a word of the reason.
    """
    module = re.search(r"could not import '(\w+)", why)
    if module:
        return importlib.util.find_spec(module[1]) is None
    folder = re.search(r"PFLCORE_DATA holds no (\S+)/ here", why)
    if folder:
        return DATA is None or not (Path(DATA) / folder[1]).is_dir()
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
        writer = session.config.get_terminal_writer()
        writer.line("\nskipped, and this machine does not explain it:")
        for line in _idle:
            writer.line(line)


# paths of the ops: the machine's instruction sets, best first, and the references


def paths() -> list[str]:
    before = library.cpu_isa()
    here = [
        name for name in ("avx512", "avx2", "plain") if library.cpu_isa(name) == name
    ]
    library.cpu_isa(before)
    return [*here, "references"]


BEST, *OTHERS = paths()  # the others belong to the deep suite
EACH = [
    BEST,
    *(pytest.param(n, marks=pytest.mark.deep("another path")) for n in OTHERS),
]


@contextlib.contextmanager
def on_references() -> Iterator[None]:
    """Makes the ops run their references, although kernels are loaded."""
    overrides = torch.library.Library("pflcore", "IMPL")
    for op, body in library.references.items():
        overrides.impl(op, body, "CPU", allow_override=True)
    try:
        yield
    finally:
        overrides._destroy()


@contextlib.contextmanager
def on_path(name: str) -> Iterator[str]:
    """Makes the ops run this path of the kernels, or their references."""
    before = library.cpu_isa()
    threads = torch.get_num_threads()
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
    """Every path of the kernels, and the references."""
    with on_path(request.param) as name:
        yield name


@pytest.fixture(params=EACH[:-1] or [BEST])
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every path of the kernels.

    There is one thread, unless the test asks for more.
    """
    if library.kernels is None:
        pytest.skip("the kernels are not loaded")
    with on_path(request.param) as name:
        yield name
