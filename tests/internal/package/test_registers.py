"""Tests of .ci/registers.py.

It keeps a table of the registers and spilled bytes of the CUDA kernels.
"""

import importlib.util

import pytest
from places import ROOT

SCRIPT = ROOT / ".ci" / "registers.py"
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="no checkout")
A = ("a_kernel", "sm_75")
B = ("b_kernel", "sm_75")


@pytest.fixture
def registers():
    spec = importlib.util.spec_from_file_location("registers", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_log_is_read(registers):
    """The log of ptxas has two kernels of two architectures."""
    name = "_ZN7pflcore4cuda10sgd_kernelIfLb1EEEvNS_3SgdIT_EE"
    log = "".join(
        f"ptxas info    : Compiling entry function '{name}' for '{arch}'\n"
        f"ptxas info    : Function properties for {name}\n"
        f"    16 bytes stack frame, {stores} bytes spill stores, 12 bytes spill loads\n"
        "ptxas info    : Used 46 registers, used 0 barriers, 504 bytes cmem[0]\n"
        for arch, stores in (("sm_75", 8), ("sm_90", 4))
    )

    got = registers.read_log(log)

    kernel = "sgd_kernel<float, true>"
    assert got == {(kernel, "sm_75"): (46, 8, 12), (kernel, "sm_90"): (46, 4, 12)}


def test_table_is_read_as_it_was_written(registers):
    uses = {A: registers.Use(32, 0, 0), B: registers.Use(128, 8, 16)}

    assert registers.read_table(registers.write_table("13.0.88", uses)) == (
        "13.0.88",
        uses,
    )


@pytest.mark.parametrize(
    "now, errors, told",
    [
        pytest.param({A: (32, 8, 8)}, [], [], id="the same"),
        pytest.param({A: (32, 12, 8)}, ["more spilled bytes"], [], id="more stores"),
        pytest.param({A: (32, 8, 12)}, ["more spilled bytes"], [], id="more loads"),
        pytest.param({A: (40, 8, 8)}, [], ["more registers"], id="more registers"),
        pytest.param({A: (32, 0, 0)}, [], ["fewer spilled bytes"], id="fewer spills"),
        pytest.param({B: (32, 8, 8)}, ["gone", "new"], [], id="other kernels"),
        pytest.param(
            {("a_kernel", "sm_80"): (32, 8, 8)},
            [],
            ["not in the table"],
            id="other cards",
        ),
    ],
)
def test_builds_are_compared(registers, now, errors, told):
    now = {key: registers.Use(*use) for key, use in now.items()}

    found = registers.compare(now, {A: registers.Use(32, 8, 8)})

    for lines, words in zip(found, (errors, told), strict=True):
        assert len(lines) == len(words)
        assert all(word in line for word, line in zip(words, lines, strict=True))


def run(
    registers, monkeypatch, tmp_path, *options, version="13.0.88", registers_used=32
):
    """Runs the script on one kernel, with the test's own table."""
    table = tmp_path / "registers.tsv"
    log = tmp_path / "log"
    log.write_text("...")
    monkeypatch.setattr(registers, "TABLE", table)
    monkeypatch.setattr(registers, "compiler_version", lambda text: version)
    monkeypatch.setattr(
        registers, "read_log", lambda text: {A: registers.Use(registers_used, 8, 8)}
    )
    return registers.main(str(log), *options)


def test_another_compiler_is_told_alone(registers, monkeypatch, tmp_path):
    (tmp_path / "registers.tsv").write_text(
        registers.write_table("13.0.88", {A: registers.Use(32, 0, 0)})
    )

    assert run(registers, monkeypatch, tmp_path) == 1
    assert run(registers, monkeypatch, tmp_path, version="13.1.1") == 0


def test_update_keeps_other_architectures(registers, monkeypatch, tmp_path):
    table = tmp_path / "registers.tsv"
    other = {("a_kernel", "sm_90"): registers.Use(40, 0, 0), B: registers.Use(1, 0, 0)}
    table.write_text(registers.write_table("13.0.88", other))

    assert run(registers, monkeypatch, tmp_path, "--update") == 0

    _, uses = registers.read_table(table.read_text())
    assert uses == {A: (32, 8, 8), ("a_kernel", "sm_90"): (40, 0, 0)}
    assert run(registers, monkeypatch, tmp_path) == 0


def test_log_without_kernels_fails(registers, tmp_path):
    (tmp_path / "log").write_text("nothing of ptxas")

    assert registers.main(str(tmp_path / "log")) == 1
