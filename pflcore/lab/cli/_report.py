"""`pflcore report`: the table and the pictures of records."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from pflcore.check import reject, require
from pflcore.data import Federation
from pflcore.lab.cli._failure import RunFailed
from pflcore.lab.cli._options import parse
from pflcore.lab.cli._output import CLIENT_FILES, FEDERATION_PICTURE, ReportOptions
from pflcore.lab.results import _run_pictures as pictures
from pflcore.lab.results import table
from pflcore.lab.results._pictures import save
from pflcore.lab.results.clients import client_table
from pflcore.simulation import History
from pflcore.simulation._files import write_text
from pflcore.simulation.record import Runs, read


def report(argv: Sequence[str]) -> int:
    """Makes the table and the pictures again, from records in folders."""
    places = [*takewhile(lambda word: not word.startswith("-"), argv)]
    about = inspect.getdoc(report) or ""
    groups = {"report": ReportOptions}
    rest = argv[len(places) :]
    values = parse("pflcore report FOLDER ...", about, groups, rest)
    options = ReportOptions(**values["report"])
    runs: list[History] = []
    for place in places:
        runs += read(place)
    words = "folders or .jsonl files that hold a record"
    got = f"{', '.join(places)}, which holds none" if places else None
    require(runs, "report", words, got)
    folder = options.out
    if folder is None:
        first = Path(places[0])
        folder = first if first.is_dir() else first.parent
    if options.per == "client":
        _write_client_report(runs, folder, options)
        return 0
    write_report(runs, folder, options)
    return 0


def _write_client_report(runs: Runs, folder: Path, options: ReportOptions) -> None:
    """Prints the table of clients, and writes it."""
    if options.format == "latex":
        reject("format", "md or csv for --per client", options.format)
    if options.baseline is None:
        words = "the algorithm that others are compared with, such as local"
        reject("baseline", words, None)
    text = client_table(runs, options.baseline, options.format)
    name = CLIENT_FILES[options.format]
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / name, text)
    print(text)
    print(f"In {folder}: {name}", file=sys.stderr)


def write_report(
    runs: Runs, folder: Path, output: ReportOptions, data: Federation | None = None
) -> None:
    """Prints the table, and writes it and the pictures.

    Without matplotlib there are no pictures. Raises RunFailed where the files cannot be
    written.

    Args:
        runs: The runs of the table.
        folder: The folder of the files.
        output: The options of the table.
        data: The federation of the runs, which gets a picture; None for none.
    """
    text = table.table(
        runs,
        output.last,
        output.baseline,
        output.columns,
        output.format,
        output.privacy_delta,
    )
    paths = [folder / output.table_file]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(paths[0], text)
        paths += pictures.draw(runs, folder)
        if data is not None:
            paths.append(_draw_federation(data, folder))
    except ImportError as e:
        print(f"{e} Then: pflcore report {folder}", file=sys.stderr)
    except OSError as e:
        print(text)
        raise RunFailed(
            f"out: table and pictures cannot be written into {folder} "
            f"({e.strerror or e}); make room there, then: pflcore report {folder}."
        ) from e
    # It is printed last, because the reader of a pipe may have gone.
    print(text)
    names = ", ".join(path.name for path in paths)
    print(f"In {folder}: {names}", file=sys.stderr)


def _draw_federation(data: Federation, folder: Path) -> Path:
    """Draws which client holds which training samples; the path of the PNG."""
    return save(data.plot(), folder / FEDERATION_PICTURE)
