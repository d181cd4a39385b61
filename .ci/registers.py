#!/usr/bin/env python3
"""Compares the CUDA kernels' registers with tests/golden/registers.tsv.

Usage: .ci/registers.py LOG [--update], LOG being what a build with `nvcc -Xptxas=-v`
printed. More spilled bytes than in the table are an error, more registers are told. A
kernel that is new or gone is an error until the table is updated. Another compiler than
the table's is told alone.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

TABLE = Path(__file__).parent.parent / "tests" / "golden" / "registers.tsv"
HEAD = "kernel\tarch\tregisters\tspilled stores, bytes\tspilled loads, bytes"
UPDATE = "python .ci/registers.py LOG --update"
ENTRY = re.compile(
    r"Compiling entry function '(\S+)' for '(\S+)'.*?"
    r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers",
    re.S,
)


class Use(NamedTuple):
    """What one kernel takes."""

    registers: int
    stores: int  # spilled, bytes
    loads: int


Uses = dict[tuple[str, str], Use]  # by kernel and architecture


def read_log(text: str) -> Uses:
    """The kernels of a build."""
    found = ENTRY.findall(text)
    names = readable_names([mangled for mangled, *_ in found])
    uses = Uses()
    for name, (_, arch, stores, loads, registers) in zip(names, found, strict=True):
        uses[name, arch] = Use(int(registers), int(stores), int(loads))
    return uses


def readable_names(mangled: list[str]) -> list[str]:
    """Names of kernels as the source has them, without arguments and namespace."""
    lines = "\n".join(mangled)
    done = subprocess.run(
        ["c++filt"], input=lines, capture_output=True, text=True, check=True
    )
    names = []
    for line in done.stdout.splitlines():
        name = (
            line.removeprefix("void ")
            .replace("pflcore::cuda::", "")
            .replace("pflcore::", "")
        )
        names.append(name.partition("(")[0].replace("> >", ">>"))
    return names


def compiler_version(text: str) -> str:
    """The version of the nvcc that a log names; "unknown" where it names none."""
    path = re.search(r"(?:^|\s)(/\S*/nvcc)\s", text, re.M)
    if not path:
        return "unknown"
    done = subprocess.run(
        [path[1], "--version"], capture_output=True, text=True, check=True
    )
    return done.stdout.split(", V")[-1].split()[0]


def read_table(text: str) -> tuple[str, Uses]:
    """The compiler of the table, and its rows."""
    first, _, *rows = text.splitlines()
    uses = Uses()
    for row in rows:
        kernel, arch, *numbers = row.split("\t")
        uses[kernel, arch] = Use(*map(int, numbers))
    return first.removeprefix("# nvcc "), uses


def write_table(version: str, uses: Uses) -> str:
    """The text of a table."""
    lines = [f"# nvcc {version}", HEAD]
    for (kernel, arch), use in sorted(uses.items()):
        lines.append("\t".join([kernel, arch, *map(str, use)]))
    return "\n".join(lines) + "\n"


def compare(now: Uses, table: Uses) -> tuple[list[str], list[str]]:
    """Errors, and lines that are only printed.

    Only the architectures of the build are compared.
    """
    archs = {arch for _, arch in now}
    known = {arch for _, arch in table}
    errors, told = [], [f"{arch}: not in the table" for arch in sorted(archs - known)]
    for key in sorted({*now, *table}):
        kernel, arch = key
        if arch not in archs & known:
            continue
        if key in table and key in now:
            spilled, more = differences(now[key], table[key])
            errors += [f"{kernel}, {arch}: {line}" for line in spilled]
            told += [f"{kernel}, {arch}: {line}" for line in more]
    seen = {key for key in {*now, *table} if key[1] in archs & known}
    errors += changed_names("gone", seen - {*now}) + changed_names(
        "new", seen - {*table}
    )
    return errors, told


def changed_names(what: str, keys: set[tuple[str, str]]) -> list[str]:
    """One error for all kernels that are new, or gone."""
    names = sorted({kernel for kernel, _ in keys})
    if not names:
        return []
    others = f" and {len(names) - 5} more" if len(names) > 5 else ""
    listed = ", ".join(names[:5]) + others
    return [f"{what}: {listed}; update the table: {UPDATE}"]


def differences(now: Use, before: Use) -> tuple[list[str], list[str]]:
    """More spilled bytes, and every other change."""
    spilled, told = [], []
    change = f"{before.stores}/{before.loads} -> {now.stores}/{now.loads}"
    if now.stores > before.stores or now.loads > before.loads:
        spilled.append(f"more spilled bytes (stores/loads), {change}")
    elif now[1:] != before[1:]:
        told.append(f"fewer spilled bytes (stores/loads), {change}")
    if now.registers > before.registers:
        told.append(f"more registers, {before.registers} -> {now.registers}")
    return spilled, told


def main(log: str, *options: str) -> int:
    """0 where no kernel spills more than the table says."""
    text = Path(log).read_text(errors="replace")
    now, version = read_log(text), compiler_version(text)
    if not now:
        print(f"registers: {log} names no kernel; it takes `nvcc -Xptxas=-v`")
        return 1
    old_version, table = (
        read_table(TABLE.read_text()) if TABLE.exists() else (version, Uses())
    )
    if "--update" in options:
        others = without_archs(table, now) if version == old_version else Uses()
        TABLE.write_text(write_table(version, {**others, **now}))
        print(f"registers: wrote {len(now)} rows to {TABLE}")
        return 0
    errors, told = compare(now, table)
    judged = version == old_version
    if not judged:
        told = [
            f"nvcc {version}, the table's is {old_version}: told alone",
            *errors,
            *told,
        ]
    for line in told:
        print("registers:", line)
    for line in errors if judged else ():
        print("registers: ERROR:", line)
    failed = bool(errors) and judged
    print(
        f"registers: {len(now)} kernels,",
        "too much is spilled" if failed else "as expected",
    )
    return int(failed)


def without_archs(table: Uses, now: Mapping[tuple[str, str], Use]) -> Uses:
    """The table's rows of architectures that were not built."""
    built = {arch for _, arch in now}
    return {key: use for key, use in table.items() if key[1] not in built}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
