"""`pflcore adapt`: a model for a client that was not in the run."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pflcore import metrics
from pflcore.check import NonNegativeInt, Seed32, Words, checked, reject, require
from pflcore.data import Federation
from pflcore.data._federation import HeldOut
from pflcore.data._read_errors import explain_read_errors
from pflcore.data._splits import random_permutation
from pflcore.data._tables import read_frame, read_tables
from pflcore.lab.cli import _experiment as experiment
from pflcore.lab.cli._config import CONFIG_FILE
from pflcore.lab.cli._experiment import Options
from pflcore.lab.cli._folder import RECORD_FILE, RunFolder
from pflcore.lab.cli._options import POSITIONAL, parse
from pflcore.lab.cli._run import command_values, jobs_of, run
from pflcore.simulation import Simulation, checkpoint
from pflcore.simulation._exported import export_models
from pflcore.simulation._models import Personalized, newcomer_data
from pflcore.simulation._models import adapt as adapted_model
from pflcore.train._losses import fraction_correct

MODEL_FOLDER = "adapted"  # in the folder of the run, for the newcomer's model


@checked
@dataclass(frozen=True)
class AdaptOptions:
    """The run, the newcomer's samples, and the place of its model.

    Args:
        folder: folder of a run with its checkpoint, or one that holds one run alone
        data: the newcomer's samples: CSV or parquet with the columns of the run's, or
            .npz with arrays x and y
        label: column of the labels, by name or number; that of the run if not said
        test: fraction of the samples that is held out to measure the model
        rounds: rounds of the newcomer's own work
        seed: seed of the samples that are held out
        out: folder to write the model into; adapted/ of the run's folder if not said
    """

    folder: Path = field(metadata=POSITIONAL)
    data: Path = field(metadata=POSITIONAL)
    label: str | None = None
    test: HeldOut = 0.25
    rounds: NonNegativeInt = 5
    seed: Seed32 = 0
    out: Path | None = None


def adapt(argv: Sequence[str]) -> int:
    """Makes, measures and exports a model for a client that was not in the run."""
    about = inspect.getdoc(adapt) or ""
    values = parse("pflcore adapt", about, {"adapt": AdaptOptions}, argv)
    options = AdaptOptions(**values["adapt"])
    folder = run_folder_in(options.folder)
    simulation, target = restored_run(folder)
    target = target if options.label is None else column_of(options.label)
    x, y = read_labelled(options.data, simulation.data, target)
    words = "samples, each with a target"
    counts = Words(f"{len(x)} samples and {len(y)} targets")
    require(len(x) == len(y) > 0, str(options.data), words, counts)
    order = random_permutation(len(y), options.seed).numpy()
    num_test = math.ceil(options.test * len(y))
    require(num_test < len(y), "test", "samples left to train on", Words(f"{len(y)}"))
    test, train = order[:num_test], order[num_test:]
    splits = {"train": (_rows(x, train), _rows(y, train))}
    if num_test:
        splits["test"] = (_rows(x, test), _rows(y, test))
    config, state = simulation.config, simulation.state
    model = adapted_model(config, state, splits, options.rounds)
    out = options.out or folder.path / MODEL_FOLDER
    header = folder.recorded()
    export_models([model], {} if header is None else header.header, out)
    print(f"{len(train)} samples to train on, {num_test} held out")
    if num_test:
        newcomer = newcomer_data(config.data, splits, config.net.ignored_label)
        y_test = newcomer.y[newcomer.index["test"][0]]
        print(quality_line(model, splits["test"][0], y_test))
    print(f"Model: {out}; pflcore predict {out} new.csv --client 0")
    return 0


def run_folder_in(folder: Path) -> RunFolder:
    """The folder of a run: this one, or the only one in it.

    Raises ValueError where there is no run, or several.
    """
    found = [folder] if (folder / RECORD_FILE).is_file() else []
    found = found or sorted(path.parent for path in folder.glob(f"*/{RECORD_FILE}"))
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        reject("folder", "the folder of one run", Words(f"{folder} with {names}"))
    return RunFolder(found[0])


def restored_run(folder: RunFolder) -> tuple[Simulation, int | str]:
    """A run as it was at its end, and the column of the labels in its files.

    Raises ValueError where its checkpoint is gone.
    """
    has_state = (folder.path / checkpoint.FILE_NAME).is_file()
    words = (
        "a run with its checkpoint (without --no-keep-checkpoint, and of a method that "
        "does not depend on the number of rounds)"
    )
    require(has_state, "folder", words, str(folder.path))
    file = folder.path / CONFIG_FILE
    values, algorithms = command_values(run, [], ["--config", str(file)])
    (job,), cut = jobs_of(values, algorithms)
    data = experiment.load_federation(job.options, cut)
    model = experiment.make_model(job.options, data, values.get("model", {}))
    simulation = job.with_ids(data).simulation(data, model)
    simulation.restore(folder.path)
    return simulation, label_column(job.options, cut)


def label_column(options: Options, cut: dict[str, Any]) -> int | str:
    """The column of the labels in the files of a run, by name or number."""
    if str(options.data).startswith("table:"):
        return str(cut.get("label", "label"))
    return column_of(cut.get("target", -1))


def column_of(words: int | str) -> int | str:
    """A column by its number where the words are one, else by its name."""
    try:
        return int(words)
    except ValueError:
        return words


def read_labelled(path: Path, data: Federation, target: int | str) -> tuple[Any, Any]:
    """The inputs and the targets of a newcomer's file, as `History.adapt` takes them.

    Raises ValueError or OSError where the file has no samples of that kind.

    Args:
        path: The file.
        data: The federation of the run.
        target: The column of the targets, by number or by name.
    """
    require(path.is_file(), "data", "a file that is there", str(path))
    is_known = path.suffix in (".csv", ".parquet", ".npz")
    require(is_known, "data", "a file .csv, .parquet or .npz", path.name)
    if path.suffix == ".npz":
        with (
            explain_read_errors(f"{path}: expected arrays x and y, got others"),
            np.load(path, allow_pickle=False) as file,
        ):
            names = {*file.files}
            require({"x", "y"} <= names, str(path), "arrays x and y", file.files)
            return torch.from_numpy(file["x"]), torch.from_numpy(file["y"])
    if data.columns is None or isinstance(target, int):
        (samples,) = read_tables([path], target, data.class_names)
        return samples
    words = (target,) if data.class_names else ()
    table = read_frame(path, *words)
    missing = [name for name in (*data.columns, target) if name not in table.columns]
    require(not missing, str(path), "all columns of the run", Words(f"no {missing}"))
    return table[list(data.columns)], table[target].to_numpy()


def _rows(values: Any, rows: Any) -> Any:
    """The rows of a frame, an array or a tensor."""
    return values.iloc[rows] if hasattr(values, "iloc") else values[rows]


def quality_line(model: Personalized, x: Any, y: torch.Tensor) -> str:
    """A line on how well a model predicts targets [B, ...] from raw features."""
    scores = model.scores(x).cpu()
    if model.returns == "values":
        error = metrics.rmse(scores, y.cpu())
        return f"rmse: {error:.4g} on the samples that were held out"
    correct = fraction_correct(scores, y.cpu()).nanmean()
    return f"accuracy: {correct:.1%} of the samples that were held out"
