"""Checkpoints: what a run needs to go on, in a folder, whole or not there at all.

`checkpoint.json` says what the run is and where it stands, and names the file of its tensors with
that file's digest. Each file is written beside its place, synced and renamed into it, the JSON
last: until then the earlier checkpoint is the one that counts. Nothing is pickled: to read a
checkpoint runs nobody's code.
"""

import contextlib
import hashlib
import json
import os
import secrets
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from pflcore.check import NonNegative, Whole, checked, refuse
from pflcore.results.record import plain
from pflcore.simulation.describe import Record, difference, identity
from pflcore.simulation.round import Setup, State, begin, load_state_dict, state_dict

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["Checkpoint", "load", "lock", "save"]
FORMAT = 3
NAME = "checkpoint.json"
DAMAGED = (
    "checkpoint: {} holds one that is damaged ({}); take a copy of it from before, or begin the "
    "run anew."
)
OURS = "checkpoint-" + "[0-9a-f]" * 16 + ".safetensors"


@checked
@dataclass
class Checkpoint:
    """Where and when a run leaves what it needs to go on: after every `every` rounds or `minutes`,
    whichever comes first; 0 is never.

    >>> simulation.run(checkpoint=Checkpoint("runs/mine", every=10))   # doctest: +SKIP
    """

    folder: str | Path
    every: Whole = 0  # rounds
    minutes: NonNegative = 10.0
    _since: float = field(default_factory=time.monotonic, init=False, repr=False)

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
    except OSError:
        refuse("out", "a folder that can be written", str(folder))
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
    """Writes `tensors` ([...], on any device, in memory of their own) and `facts` (what JSON can
    hold, and NaN) into `folder`, instead of the checkpoint that is there. OSError in one sentence
    where it cannot be written: then the earlier one stands."""
    folder, name, digest = Path(folder), None, None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if tensors:
            name = f"checkpoint-{secrets.token_hex(8)}.safetensors"
            with replacing(folder / name) as part:
                write_tensors(tensors, part)
                digest = _digest(part.read_bytes())
        text = json.dumps(
            {**facts, "format": FORMAT, "tensors": name, "sha256": digest}, default=plain
        )
        with replacing(folder / NAME) as part:
            part.write_text(f'{{"sha256": "{_digest(text.encode())}", "checkpoint": {text}}}\n')
    except OSError as e:
        if name is not None:
            (folder / name).unlink(missing_ok=True)
        raise OSError(
            f"checkpoint: it cannot be written into {folder} ({e.strerror or e}); the one before "
            "it, if any, stands."
        ) from None
    for old in [*folder.glob(OURS), *folder.glob("checkpoint*.part")]:
        if old.name != name:
            old.unlink()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@checked
def load(folder: str | Path) -> tuple[dict[str, Tensor], Record]:
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
    import safetensors.torch

    name = Path(facts["tensors"]).name
    try:
        data = (Path(folder) / name).read_bytes()
        if _digest(data) != facts["sha256"]:
            raise OSError(0, "it was altered, cut off or exchanged")
        tensors = safetensors.torch.load(data)
    except (OSError, safetensors.SafetensorError) as e:  # the latter by one who made the digest fit
        why = getattr(e, "strerror", None) or " ".join(str(e).split())
        raise ValueError(DAMAGED.format(folder, f"{name}: {why}")) from None
    return {k: v.clone() for k, v in tensors.items()}, facts  # clones: aligned as torch aligns


def _facts(path: Path) -> Record:
    try:
        whole = json.loads(path.read_bytes())
        facts: Record = whole["checkpoint"]
        if whole["sha256"] != _digest(json.dumps(facts).encode()):
            raise ValueError
    except OSError as e:
        raise ValueError(
            f"checkpoint: expected a folder that holds one, got {path.parent}, which has no {NAME} "
            f"that can be read ({e.strerror}); check the name."
        ) from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(DAMAGED.format(path.parent, f"{NAME} was altered or cut off")) from None
    return facts


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
    import safetensors.torch

    try:
        safetensors.torch.save_file(
            {k: v.detach().cpu().contiguous() for k, v in tensors.items()}, path
        )
    except KeyError as e:
        raise TypeError(
            f"checkpoint: safetensors holds no {e.args[0]}; keep the state in another dtype."
        ) from None
    except safetensors.SafetensorError as e:
        raise OSError(str(e)) from None


# a run's ----------------------------------------------------------------------------------------


def save_run(folder: str | Path, run: Any) -> None:
    """Writes the checkpoint of a run, a `Simulation`. OSError where that cannot be."""
    net, state, rounds = run.setting.net, run._state, []
    tensors = state_dict(run.algorithm, state) | {"net.w0": net.w0, "net.b0": net.b0}
    for record in run._records:
        long = {k: v for k, v in record["report"].items() if isinstance(v, Tensor)}
        tensors |= {f"report.{record['round']}.{k}": v for k, v in long.items()}
        rounds.append({**record, "report": record["report"] | dict.fromkeys(long)})
    where = {"round": state.round, "void": state.void, "outlier": run._outlier}
    save(folder, tensors, {"run": identity(run), **where, "rounds": rounds})


def restored(folder: str | Path, run: Any) -> tuple[Setup, State, list[Any], list[Record]]:
    """What a run, a `Simulation`, takes up from its checkpoint: where it started, its state, the
    farthest update so far and the records. ValueError where it is another run's, a warning where it
    was made elsewhere."""
    tensors, facts = load(folder)
    there, here = facts.get("run", {}), identity(run)
    made_with, made_here = (what.pop("made_with", {}) for what in (there, here))
    if differs := difference(there, here):
        raise ValueError(
            f"checkpoint: {folder} holds that of another run: {differs}; give what it was made "
            "with, or another folder."
        )
    if other := difference(made_with, made_here):
        last = "numbers may differ in their last digits from an unbroken run's."
        warnings.warn(f"checkpoint: {other}; {last}", stacklevel=3)
    like = run.setting.net
    net = like.to(like.w0.device)  # one of its own, that starts where the run did
    net.w0, net.b0 = (tensors.pop(f"net.{k}").to(like.w0.device) for k in ("w0", "b0"))
    setup = run.setup._replace(setting=run.setting._replace(net=net))
    rounds = {record["round"]: record for record in facts["rounds"]}
    for name in [k for k in tensors if k.startswith("report.")]:
        _, round, key = name.split(".", 2)
        rounds[int(round)]["report"][key] = tensors.pop(name)
    begun = begin(run.algorithm, net, run.data.n, setup.folder)
    state = load_state_dict(run.algorithm, begun, tensors, facts["round"], facts["void"])
    return setup, state, facts["outlier"], facts["rounds"]
