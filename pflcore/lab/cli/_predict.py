"""`pflcore predict`: a client's exported model on new samples in a file."""

from __future__ import annotations

import csv
import inspect
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

from pflcore.check import Words, import_object, reject, require
from pflcore.data._read_errors import explain_read_errors
from pflcore.data._tables import read_lines
from pflcore.lab.cli._options import POSITIONAL, parse
from pflcore.metrics import class_probabilities
from pflcore.simulation._exported import (
    MANIFEST_FILE,
    client_names,
    load_model,
    read_manifest,
)
from pflcore.simulation._files import atomic_write
from pflcore.simulation._models import Personalized

MODELS_FOLDER = "models"  # the folder of exported models, in the folder of a run
SHOWN_FOLDERS = 5  # the most folders that an error names


@dataclass(frozen=True)
class PredictOptions:
    """The model, the samples, and the place of the predictions.

    Args:
        folder: folder that History.export has written; or the folder of a run with
            --export, or one that holds the models of one run alone
        data: CSV file with a line of names, of which those of the model's columns are
            taken; for models without names of columns CSV of numbers, .npy or .npz
            (array x)
        client: the client whose model predicts, by name or number
        model: package.module:function that makes the model, where the manifest cannot
            rebuild it
        algorithm: package.module:Class of an algorithm of your own that mixes models
        out: CSV file to write; printed if not said
        scores: also write the scores of each class
        probabilities: also write the probability of each class
    """

    folder: Path = field(metadata=POSITIONAL)
    data: Path = field(metadata=POSITIONAL)
    client: str
    model: str | None = None
    algorithm: str | None = None
    out: Path | None = None
    scores: bool = False
    probabilities: bool = False


def predict(argv: Sequence[str]) -> int:
    """Predicts by a client's exported model, and prints the predictions as CSV."""
    about = inspect.getdoc(predict) or ""
    values = parse("pflcore predict", about, {"predict": PredictOptions}, argv)
    options = PredictOptions(**values["predict"])
    options = replace(options, folder=models_folder(options.folder))
    client = _client(options)
    make_model = None
    if options.model is not None:
        make_model = import_object(options.model, "model")
    model = load_model(options.folder, client, make_model, options.algorithm)
    lines = list(_prediction_lines(model, options))
    if options.out is None:
        _write_lines(sys.stdout, lines)
        return 0
    with (
        atomic_write(options.out) as part,
        open(part, "w", newline="", encoding="utf-8") as file,
    ):
        _write_lines(file, lines)
    return 0


def models_folder(folder: Path) -> Path:
    """The folder with the manifest: this one, or the only one that a run left in it.

    A folder without any manifest is returned as it is. Raises ValueError, with the
    names of the folders, where it holds the models of several runs.
    """
    if (folder / MANIFEST_FILE).exists():
        return folder
    found = []
    for pattern in ("*", f"*/{MODELS_FOLDER}"):
        manifests = sorted(folder.glob(f"{pattern}/{MANIFEST_FILE}"))
        found += [path.parent for path in manifests]
    if len(found) > 1:
        shown = ", ".join(map(str, found[:SHOWN_FOLDERS]))
        more = ", ..." if len(found) > SHOWN_FOLDERS else ""
        words = f"the models of one run ({shown}{more})"
        reject("folder", words, Words(f"{folder}, which holds {len(found)}"))
    return found[0] if found else folder


def _client(options: PredictOptions) -> int | str:
    """The client by its number, or by its name where the clients have names.

    A number is a client's place only where no name is a number, too.
    """
    client = options.client
    names = client_names(read_manifest(options.folder)) or []
    has_numbers = any(name.isdecimal() for name in names)
    if client.isdecimal() and not has_numbers:
        return int(client)
    return client


def _prediction_lines(
    model: Personalized, options: PredictOptions
) -> Iterator[list[Any]]:
    """The lines of the CSV: names, then a line for each of the file.

    A line of the file without a sample has an empty one, and a number that is NaN, as
    those of a sample with a gap are, is an empty cell.
    """
    samples, has_sample = read_samples(options.data, model)
    answers = _columns(np.asarray(model.predict(samples)))
    names = _numbered("prediction", answers.shape[1])
    rows = answers.tolist()
    for word, numbers in _numbers_by_class(model, samples, options):
        names += _class_columns(word, numbers.shape[1], model.class_names or ())
        cells = np.where(np.isnan(numbers), "", numbers.astype(object)).tolist()
        pairs = zip(rows, cells, strict=True)
        rows = [row + of_classes for row, of_classes in pairs]
    yield names
    yield from _beside_lines(rows, has_sample)


def _numbers_by_class(
    model: Personalized, samples: Any, options: PredictOptions
) -> Iterator[tuple[str, Any]]:
    """Yields the numbers [n, C] that the options ask for, with a word for them."""
    if not (options.scores or options.probabilities):
        return
    scores = model.scores(samples)
    if options.scores:
        yield "score", _columns(scores.numpy())
    if options.probabilities:
        words = "a model that scores classes"
        require(model.returns != "values", "probabilities", words, "one of numbers")
        if scores.dim() == 1:
            scores = scores[:, None]
        yield "probability", _columns(class_probabilities(scores).numpy())


def _class_columns(word: str, count: int, classes: Sequence[str]) -> list[str]:
    """The names of a column for each class."""
    if len(classes) == count:
        return [f"{word} {name}" for name in classes]
    return _numbered(word, count)


def _beside_lines(rows: list[list[Any]], has_sample: Any) -> Iterator[list[Any]]:
    """The rows of the samples, and an empty one where a line has no sample."""
    empty = [None] * len(rows[0])
    following = iter(rows)
    for has_row in has_sample:
        yield next(following) if has_row else empty


def read_samples(path: Path, model: Personalized) -> tuple[Any, Any]:
    """The samples [n] of a file, as `Personalized.predict` takes them, and a mask.

    The mask [lines] is True for the lines of the file that have a sample. Raises
    ValueError or OSError where it holds none.
    """
    require(path.is_file(), "data", "a file that is there", str(path))
    is_known = path.suffix in (".csv", ".npy", ".npz")
    require(is_known, "data", "a file .csv, .npy or .npz", path.name)
    if path.suffix == ".csv":
        samples, has_sample = read_lines(path, named=model.columns is not None)
        if model.columns is None:
            samples = torch.from_numpy(samples)
        return samples, has_sample
    with explain_read_errors(f"{path}: expected an array of numbers, got others"):
        samples = np.load(path, allow_pickle=False)
        if path.suffix == ".npz":
            with samples as file:
                require("x" in file.files, "arrays", "an array x", file.files)
                samples = file["x"]
    shape = list(samples.shape)
    require(samples.size, str(path), "samples [B, ...]", Words(f"the shape {shape}"))
    require(samples.ndim, str(path), "samples [B, ...]", Words("one number"))
    return samples, np.ones(len(samples), bool)


def _columns(values: Any) -> Any:
    """Values [n] or [n, ...] as rows [n, K]."""
    return values.reshape(len(values), -1)


def _numbered(name: str, count: int) -> list[str]:
    """The names of `count` columns; a single one has no number."""
    return [name] if count == 1 else [f"{name} {k}" for k in range(count)]


def _write_lines(file: TextIO, lines: Sequence[Sequence[Any]]) -> None:
    """Writes lines as CSV; None is an empty field."""
    csv.writer(file, lineterminator="\n").writerows(lines)
