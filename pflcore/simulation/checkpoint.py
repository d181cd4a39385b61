"""Checkpoints: what a run needs to go on, in a folder, whole or not there at all.

`checkpoint.json` says what the run is and where it stands, and names the file of its tensors with
that file's digest. Each file is written beside its place, synced and renamed into it, the JSON
last: until then the earlier checkpoint is the one that counts. Nothing is pickled: to read a
checkpoint runs nobody's code.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from pflcore.algorithms import ALGORITHMS
from pflcore.check import NonNegative, Whole, check, checked
from pflcore.simulation.attacks import Adversary
from pflcore.simulation.describe import difference
from pflcore.simulation.round import Setup, State, begin, load_state_dict, state_dict
from pflcore.simulation.settings import Evaluation, Hardware, Robustness
from pflcore.train import Training

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["Checkpoint", "load", "lock", "save"]
FORMAT = 2
NAME = "checkpoint.json"
DAMAGED = (
    "checkpoint: {} holds one that is damaged ({}); take a copy of it from before, or begin the "
    "run anew."
)
Facts = dict[str, Any]
Record = dict[str, Any]


@dataclass
class Checkpoint:
    """Where and when a run leaves what it needs to go on: after every `every` rounds or `minutes`,
    whichever comes first; 0 is never.

    >>> simulation.run(checkpoint=Checkpoint("runs/mine", every=10))   # doctest: +SKIP
    """

    folder: str | Path
    every: Whole = 0  # rounds
    minutes: NonNegative = 10.0
    note: Callable[[], Facts] | None = None  # what the caller, who holds the lock, wants to know
    # later, instead of the records
    _since: float = field(default_factory=time.monotonic, init=False, repr=False)

    def __post_init__(self) -> None:
        check(self)
        _safetensors()  # now, not after ten minutes

    @property
    def exists(self) -> bool:
        """Whether the folder holds a checkpoint."""
        return (Path(self.folder) / NAME).exists()

    def due(self, round: int) -> bool:
        """Whether it is time for a checkpoint after `round`; the minutes count from when it last
        was."""
        by_time = 0 < self.minutes <= (time.monotonic() - self._since) / 60
        if not (by_time or (self.every and round % self.every == 0)):
            return False
        self._since = time.monotonic()
        return True


@checked
@contextlib.contextmanager
def lock(folder: str | Path) -> Iterator[None]:
    """Keeps other runs out of `folder`, which is made, until the block or the process ends, however
    that ends. ValueError where another run is in it, or where nothing can be written there."""
    path = Path(folder) / ".lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "ab")  # noqa: SIM115 (closed below)
    except OSError as e:
        raise ValueError(
            f"out: expected a folder that can be written, got {folder} ({e.strerror}); name "
            "another."
        ) from None
    with file:
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"out: another run is writing into {folder}; wait until it has ended, or name "
                "another folder."
            ) from None
        except OSError:
            pass  # a file system without locks
        yield


@checked
def save(folder: str | Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Writes `tensors` ([...], on any device; they may share memory) and `facts` (what JSON can
    hold, and NaN) into `folder`, instead of the checkpoint that is there. OSError in one
    sentence where it cannot be written: then the earlier one stands."""
    folder, name, digest, placed = Path(folder), None, None, False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if tensors:
            name = f"checkpoint-{secrets.token_hex(8)}.safetensors"
            with replacing(folder / name) as part:
                write_tensors(tensors, part)
                with open(part, "rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
        whole = {**facts, "format": FORMAT, "tensors": name, "sha256": digest}
        text = json.dumps(whole, default=_listed)
        own = hashlib.sha256(text.encode()).hexdigest()
        with replacing(folder / NAME) as part:
            part.write_text(f'{{"sha256": "{own}", "checkpoint": {text}}}\n')
        placed = True
    except OSError as e:
        raise OSError(
            f"checkpoint: it cannot be written into {folder} ({e.strerror or e}); the one before "
            "it, if any, stands."
        ) from None
    finally:
        if name is not None and not placed:
            (folder / name).unlink(missing_ok=True)
    olds = [
        folder.glob(f"checkpoint-{'[0-9a-f]' * 16}.safetensors"),
        folder.glob("checkpoint*.part"),
    ]
    for old in (file for found in olds for file in found if file.name != name):
        old.unlink(missing_ok=True)


@checked
def load(folder: str | Path) -> tuple[dict[str, Tensor], Facts]:
    """The tensors [...], on the CPU, and the facts of the checkpoint in `folder`. ValueError in one
    sentence where there is none, or where one byte of it is not what was written."""
    facts = _facts(Path(folder) / NAME)
    if facts["format"] != FORMAT:
        raise ValueError(
            f"checkpoint: expected format {FORMAT}, got {facts['format']} in {folder}; take the "
            "pflcore that wrote it."
        )
    if facts["tensors"] is None:
        return {}, facts
    name = Path(facts["tensors"]).name
    try:
        data = (Path(folder) / name).read_bytes()
    except OSError as e:
        raise ValueError(DAMAGED.format(folder, f"{name}: {e.strerror}")) from None
    if hashlib.sha256(data).hexdigest() != facts["sha256"]:
        raise ValueError(DAMAGED.format(folder, f"{name} was altered, cut off or exchanged"))
    library = _safetensors()
    try:
        tensors = library.load(data)
    except Exception as e:  # written by somebody else, with a digest that fits
        said = " ".join(str(e).split())
        raise ValueError(DAMAGED.format(folder, f"{name} is no safetensors file: {said}")) from None
    return {k: v.clone() for k, v in tensors.items()}, facts  # clones: aligned as torch aligns


def _facts(path: Path) -> Facts:
    try:
        whole = json.loads(path.read_bytes())
        facts: Facts = whole["checkpoint"]
        if whole["sha256"] != hashlib.sha256(json.dumps(facts).encode()).hexdigest():
            raise ValueError
    except FileNotFoundError:
        raise ValueError(
            f"checkpoint: expected a folder that holds one, got {path.parent}, which has no "
            f"{NAME}; check the name."
        ) from None
    except OSError as e:
        raise ValueError(f"checkpoint: {path} cannot be read ({e.strerror}).") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(DAMAGED.format(path.parent, f"{NAME} was altered or cut off")) from None
    return facts


def _listed(value: Any) -> Any:
    """A callback's number or array of NumPy or torch, for JSON."""
    return value.tolist() if hasattr(value, "tolist") else repr(value)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside `path` to be written, which takes its place once it is whole and on the disk;
    where the block fails it is removed."""
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")  # nobody can have put a link
    try:
        yield part
        _sync(part)
        part.replace(path)
        with contextlib.suppress(OSError):  # not every file system, nor Windows, syncs a folder
            _sync(path.parent)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Writes a safetensors file. OSError where the disk will not take it, TypeError for a dtype
    that the format does not have."""
    flat: dict[str, Tensor] = {}
    memory: set[int] = set()
    for name, t in tensors.items():
        t = t.detach().cpu().contiguous()
        shared = t.untyped_storage().data_ptr() in memory  # the format has no shared memory
        flat[name] = t.clone() if shared else t
        memory.add(flat[name].untyped_storage().data_ptr())
    try:
        _safetensors().save_file(flat, path)
    except KeyError as e:
        raise TypeError(
            f"checkpoint: safetensors holds no {e.args[0]}; keep the state in another dtype."
        ) from None
    except Exception as e:
        if isinstance(e, OSError) or type(e).__name__ != "SafetensorError":
            raise
        raise OSError(str(e)) from None


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError:
        raise ImportError(
            "checkpoint: it needs safetensors, which is not installed; get it with: pip install "
            "safetensors."
        ) from None
    return safetensors.torch


# a run's ----------------------------------------------------------------------------------------


def save_run(
    keeper: Checkpoint,
    setup: Setup,
    state: State,
    identity: Facts,
    outlier: tuple[float, int, int] | None,
    rounds: Sequence[Record],
) -> None:
    """Writes the checkpoint of a run. OSError where that cannot be."""
    note, net = keeper.note() if keeper.note else None, setup.setting.net
    records = rounds if note is None else []
    tensors = state_dict(setup.algorithm, state) | {"net.w0": net.w0, "net.b0": net.b0}
    long = {
        (r["round"], k): v for r in records for k, v in r["report"].items() if isinstance(v, Tensor)
    }
    tensors |= {f"report.{round}.{k}": v for (round, k), v in long.items()}
    plain = [
        {**r, "report": {k: None if isinstance(v, Tensor) else v for k, v in r["report"].items()}}
        for r in records
    ]
    where = {"round": state.round, "void": state.void, "outlier": outlier}
    save(keeper.folder, tensors, {"run": identity, **where, "note": note, "rounds": plain})


def check_same(folder: str | Path, there: Facts, here: Facts) -> None:
    """ValueError where a checkpoint is another run's; a warning where it was made elsewhere."""
    aside = {"machine": None, "made_with": None}
    here = json.loads(json.dumps(here))
    differs = difference(there | aside, here | aside)
    if differs:
        raise ValueError(
            f"checkpoint: {folder} holds that of another run: {differs}; give what it was made "
            "with, or another folder."
        )
    other = difference(there["made_with"], here["made_with"])
    if other:
        warnings.warn(
            f"checkpoint: {other}; numbers may differ in their last digits from an unbroken run's.",
            stacklevel=4,
        )


def restored(
    folder: str | Path, setup: Setup, identity: Facts
) -> tuple[Setup, State, tuple[float, int, int] | None, list[Record]]:
    """What a run, which `identity` describes, takes up from its checkpoint: where it started, its
    state, the farthest update so far and the records. ValueError where it is another run's."""
    tensors, facts = load(folder)
    check_same(folder, facts["run"], identity)
    like = setup.setting.net
    net = like.to(like.w0.device)  # one of its own, that starts where the run did
    net.w0, net.b0 = (tensors[f"net.{k}"].to(like.w0.device) for k in ("w0", "b0"))
    setup = setup._replace(setting=setup.setting._replace(net=net))
    begun = begin(setup.algorithm, net, setup.setting.data.n, setup.folder)
    own = {k: v for k, v in tensors.items() if k.partition(".")[0] not in ("net", "report")}
    state = load_state_dict(setup.algorithm, begun, own, facts["round"], facts["void"])
    outlier = facts["outlier"] and tuple(facts["outlier"])
    return setup, state, outlier, records_of(tensors, facts)


def records_of(tensors: Mapping[str, Tensor], facts: Facts) -> list[Record]:
    """The records of the rounds up to a checkpoint."""
    rounds: list[Record] = facts["rounds"]
    for name, value in tensors.items():
        part, _, key = name.partition(".")
        if part == "report":
            round, _, key = key.partition(".")
            next(r for r in rounds if r["round"] == int(round))["report"][key] = value
    return rounds


def options(folder: str | Path, what: Facts | None, given: Mapping[str, Any]) -> Facts:
    """What a simulation is made with to go on with the run that `what` describes: `given` (which
    stands above it), and the rest of it."""
    if what is None:
        raise ValueError(
            f"checkpoint: {folder} is that of a command between two runs, and holds no state; go "
            "on with its --resume."
        )
    made, stored = dict(given), {**what["conditions"], **what["machine"]}
    if "algorithm" not in made:
        if what["algorithm"] not in ALGORITHMS:
            raise ValueError(
                f"algorithm: the checkpoint is of {what['algorithm']}, which is not pflcore's own; "
                "give it: algorithm=..."
            )
        cls = ALGORITHMS[what["algorithm"]]
        made["algorithm"] = cls(**rebuilt("algorithm", what["options"]))
    stored |= {"training": what["training"]}
    groups = {
        "training": Training,
        "evaluation": Evaluation,
        "robustness": Robustness,
        "hardware": Hardware,
    }
    for key, value in stored.items():
        if key not in made:
            value = rebuilt(key, value) if key in groups else rebuilt(key, {key: value})[key]
            if key == "robustness" and value["adversary"] is not None:
                value["adversary"] = Adversary(**value["adversary"])
            made[key] = groups[key](**value) if key in groups else value
    return made


def rebuilt(name: str, values: Record) -> Record:
    """Values that were kept as JSON, lists as tuples. ValueError where one was a function."""
    for key, value in values.items():
        if '{"function":' in json.dumps(value):
            raise ValueError(
                f"{name}: the checkpoint's {key} has a function in it, which no file holds; give "
                f"it: {name}=..."
            )
    return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
