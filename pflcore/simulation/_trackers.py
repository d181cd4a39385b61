"""Trackers: callbacks that send each round's numbers to TensorBoard, W&B or MLflow."""

from __future__ import annotations

import itertools
import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pflcore.check import checked, import_optional, warn_caller
from pflcore.simulation._export import require_tensorboard, scalars, summary_writer
from pflcore.simulation._history import RunEnd
from pflcore.simulation.record import to_json

Record = dict[str, Any]
MAX_NAME_LETTERS = 250  # of a name in MLflow
# What MLflow does not take in a name: other letters, and, because a name may be the
# path of a file, empty folders, "." and "..".
REFUSED_IN_NAMES = re.compile(r"[^/\w.\- :]|(?<![^/])/|/\Z|(?<![^/])\.{1,2}(?=/|\Z)")
MAX_PARAMETERS = 100  # of one call of MLflow
MAX_PARAMETER_LETTERS = 250  # of a value in MLflow's table of parameters


@checked
class Tracker:
    """A callback that sends each round's numbers to a service.

    The names of the numbers are those of `History.to_tensorboard`: "eval/accuracy",
    "train/loss", "traffic/bytes_up", and so on. A round that cannot be sent is a
    warning, and the run goes on.

    The tracker is a context manager, whose end closes it. An error of `close` is a
    warning there:

        with Wandb("my project") as tracker:
            simulation.run(tracker)

    A run counts as failed where it diverged, or was interrupted, or ended with an
    error. One that a callback such as `EarlyStopping` stopped did not fail.

    A tracker of your own derives from this class and has the method `log`.

    Args:
        clients: True adds each client's numbers to the means over clients.
        config: The facts on the run, such as `simulation.header()`, which have the
            clients' names; None: clients are called by their ids.

    Attributes:
        has_failed: True where the last run broke off.
    """

    has_failed: bool = False

    def __init__(
        self, clients: bool = False, config: Mapping[str, Any] | None = None
    ) -> None:
        self.clients = clients
        self.names = (config or {}).get("names")

    def take_end(self, end: RunEnd | None) -> None:
        """Keeps whether a run broke off; `Simulation.run` calls it at its end."""
        self.has_failed = end is not None and end.broke_off

    def __call__(self, round: int, record: Record) -> None:
        """Sends one round's record."""
        try:
            self.log(round, scalars(record, self.clients, self.names))
        except Exception as e:
            self._warn(f"round {round} was not sent", e, "The run goes on.")

    def _warn(self, text: str, e: Exception, end: str) -> None:
        """Warns of an error of the service."""
        reason = next(iter(str(e).strip().splitlines()), "")
        name = type(self).__name__
        warn_caller(
            f"{name}: {text} ({type(e).__name__}: {reason}). {end}", RuntimeWarning
        )

    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        """Sends the numbers of one round, by name."""
        raise NotImplementedError

    def close(self, failed: bool = False) -> None:
        """Ends the run of the service.

        Args:
            failed: True where the run failed.
        """

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        try:
            self.close(failed=error is not None or self.has_failed)
        except Exception as e:
            self._warn("the end was not sent", e, "The run itself has its results.")


@checked
class TensorBoard(Tracker):
    """Writes each round's numbers into a folder for `tensorboard --logdir`.

    It needs the package tensorboard. A run that goes on from a checkpoint writes its
    earlier rounds again, in the place of those that the folder has.

    Args:
        folder: The folder for the events.
        clients: Add a curve for each client to the means over clients.
        config: The facts on the run, such as `simulation.header()`, which have the
            clients' names.
    """

    def __init__(
        self,
        folder: str | Path,
        clients: bool = False,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(clients, config)
        require_tensorboard()
        self._folder = folder
        self._writer: Any = None  # before the first round
        self._last_round = 0

    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        """Writes the numbers of one round."""
        if self._writer is None or round <= self._last_round:
            self.close()
            self._writer = summary_writer(self._folder, round)
        self._last_round = round
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, round)
        self._writer.flush()

    def close(self, failed: bool = False) -> None:
        """Closes the file of events."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


@checked
class Wandb(Tracker):
    """Sends each round's numbers to Weights & Biases, or to its files offline.

    It needs the package wandb, and where it is to send, a login (`wandb login`). With
    the environment variable WANDB_MODE=offline it writes files for `wandb sync`.

    Args:
        project: The project; None for that of the variable WANDB_PROJECT.
        name: The name of the run; None for one that W&B makes up.
        config: The facts on the run, such as `simulation.header()`.
        clients: Add a curve for each client to the means over clients.
        options: More options of `wandb.init`: entity, group, tags, mode, dir, ...
    """

    def __init__(
        self,
        project: str | None = None,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        clients: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(clients, config)
        wandb = import_optional("wandb")
        config = to_json(config or {})
        self._run = wandb.init(project=project, name=name, config=config, **options)

    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        """Sends the numbers of one round."""
        self._run.log(dict(numbers), step=round)

    def close(self, failed: bool = False) -> None:
        """Ends the run of W&B."""
        self._run.finish(exit_code=int(failed or self.has_failed))


@checked
class MLflow(Tracker):
    """Sends each round's numbers to an MLflow server, a database or a folder.

    It needs the package mlflow. MLflow's active run stays as it is. Letters that MLflow
    does not take in a name become "_". Of two names that would be equal then, the
    second one gets a number.

    Args:
        experiment: The experiment, which is made where it does not exist; None for
            that of the variable MLFLOW_EXPERIMENT_NAME, else "Default".
        name: The name of the run; None for one that MLflow makes up.
        config: The facts on the run, such as `simulation.header()`. They become the
            run's parameters, without lists that are long.
        clients: Add a curve for each client to the means over clients. A server or a
            database takes them, a folder does not.
        tracking_uri: The server or file, such as "sqlite:///mlflow.db"; None for that
            of MLflow itself (the variable MLFLOW_TRACKING_URI).
    """

    def __init__(
        self,
        experiment: str | None = None,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        clients: bool = False,
        tracking_uri: str | None = None,
    ) -> None:
        super().__init__(clients, config)
        mlflow = import_optional("mlflow")
        self._entities = mlflow.entities
        self._client = mlflow.MlflowClient(tracking_uri)
        experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
        found = self._client.get_experiment_by_name(experiment)
        if found is None:
            experiment_id = self._client.create_experiment(experiment)
        else:
            experiment_id = found.experiment_id
        self._names = _MLflowNames()
        run = self._client.create_run(experiment_id, run_name=name)
        self._run_id = run.info.run_id
        # Times count from the run's start, because the clock of the machine can jump.
        self._start = run.info.start_time  # milliseconds
        self._began = time.monotonic()
        parameters = []
        keys = _MLflowNames()
        for key, value in flat_parameters(to_json(config or {})).items():
            parameters.append(mlflow.entities.Param(keys[key], value))
        for start in range(0, len(parameters), MAX_PARAMETERS):
            some = parameters[start : start + MAX_PARAMETERS]
            self._client.log_batch(self._run_id, params=some)

    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        """Sends the numbers of one round."""
        now = self._start + int(1000 * (time.monotonic() - self._began))
        metric = self._entities.Metric
        metrics = []
        for name, value in numbers.items():
            metrics.append(metric(self._names[name], value, now, round))
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self, failed: bool = False) -> None:
        """Ends the run of MLflow."""
        status = "FAILED" if failed or self.has_failed else "FINISHED"
        self._client.set_terminated(self._run_id, status)


class _MLflowNames(dict[str, str]):
    """The name in MLflow of each name, a different one for each."""

    def __init__(self) -> None:
        super().__init__()
        self._taken: set[str] = set()

    def __missing__(self, name: str) -> str:
        """A name that MLflow takes, and that stands for no other name so far."""
        cleaned = REFUSED_IN_NAMES.sub(lambda match: "_" * len(match[0]), name)
        for number in itertools.count(1):
            ending = "" if number == 1 else f" {number}"
            candidate = cleaned[: MAX_NAME_LETTERS - len(ending)] + ending
            if candidate not in self._taken:
                break
        self._taken.add(candidate)
        self[name] = candidate
        return candidate


def flat_parameters(config: Mapping[str, Any]) -> dict[str, str]:
    """Values of nested dicts as text, by names such as "training.lr".

    Values whose text is long, such as the sizes of all clients, are left out.
    """
    parameters = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            for name, text in flat_parameters(value).items():
                parameters[f"{key}.{name}"] = text
            continue
        text = value if isinstance(value, str) else json.dumps(value)
        if len(text) <= MAX_PARAMETER_LETTERS:
            parameters[str(key)] = text
    return parameters
