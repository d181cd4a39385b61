"""Executes the notebooks docs/tutorials/*.ipynb and stores their outputs.

`make tutorials` executes all of them, and `python docs/make_tutorials.py compare sites`
those of these names. A test executes them again and compares the outputs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).with_name("tutorials")
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
TIMEOUT = 600  # seconds for a cell; a notebook takes less than a minute on quiet cores


def executed(path: Path) -> Any:
    """The notebook with the outputs of a new kernel, which starts in its folder."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=TIMEOUT,
        kernel_name=KERNEL["name"],
        resources={"metadata": {"path": str(path.parent)}},
        record_timing=False,
        coalesce_streams=True,
    )
    client.execute()
    for cell in notebook.cells:
        remove_warnings(cell)
    # Neither versions nor paths of this machine belong into the file.
    notebook.metadata = nbformat.from_dict(
        {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    )
    return notebook


def remove_warnings(cell: Any) -> None:
    """Removes what a cell wrote to stderr: warnings that name this machine's paths."""
    if cell.cell_type == "code":
        cell.outputs = [o for o in cell.outputs if o.get("name") != "stderr"]


def main(names: list[str]) -> None:
    """Writes the notebooks of these names, or all where there are none."""
    paths = [FOLDER / f"{name}.ipynb" for name in names]
    for path in paths or sorted(FOLDER.glob("*.ipynb")):
        print(path.name, flush=True)
        nbformat.write(executed(path), path)


if __name__ == "__main__":
    main(sys.argv[1:])
