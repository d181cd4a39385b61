"""Checkpoints: what a run needs to go on, in a folder, whole or not there at all.

`checkpoint.json` says what the run is and where it stands, and names the file of its tensors with that file's digest. Each file is written
beside its place, synced and renamed into it, the JSON last: until then the earlier checkpoint is the one that counts. Nothing is pickled:
to read a checkpoint runs nobody's code.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pflcore.data.federation import Federation
from pflcore.data.ragged import Ragged
from pflcore.ops import kinds
from pflcore.train.net import Net

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["Checkpoint", "load", "lock", "save"]
FORMAT = 1
NAME = "checkpoint.json"
LARGE = 2**28  # bytes of a tensor beyond which its digest looks at rows in even distances
Facts = dict[str, Any]


def _are_tensors(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(t, Tensor) for t in value.values())


@kinds.takes(
    folder=kinds.PLACE, every=kinds.whole(0), minutes=kinds.number(0, words="a number of minutes, 0 for none"), note=kinds.FUNCTION
)
@dataclass
class Checkpoint:
    """Where and when a run leaves what it needs to go on: after every `every` rounds or `minutes`, whichever comes first; 0 is never.

    >>> simulation.run(checkpoint=Checkpoint("runs/mine", every=10))   # doctest: +SKIP
    """

    folder: str | Path
    every: int = 0  # rounds
    minutes: float = 10.0
    note: Callable[[], Facts] | None = None  # what the caller, who holds the lock, wants to know later, in the place of the records
    _since: float = field(default_factory=time.monotonic, init=False, repr=False)

    def __post_init__(self) -> None:
        _safetensors()  # now, not after ten minutes

    @property
    def exists(self) -> bool:
        """Whether the folder holds a checkpoint."""
        return (Path(self.folder) / NAME).exists()

    def due(self, round: int) -> bool:
        """Whether it is time for a checkpoint after `round`; the minutes count from when it last was."""
        by_time = 0 < self.minutes <= (time.monotonic() - self._since) / 60
        if not (by_time or (self.every and round % self.every == 0)):
            return False
        self._since = time.monotonic()
        return True


@kinds.takes(folder=kinds.PLACE)
@contextlib.contextmanager
def lock(folder: str | Path) -> Iterator[None]:
    """Keeps other runs out of `folder`, which is made, until the block or the process ends, however that ends. ValueError where another
    run is in it, or where nothing can be written there."""
    path = Path(folder) / ".lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "ab")  # noqa: SIM115 (closed below)
    except OSError as e:
        raise ValueError(f"out: expected a folder that can be written, got {folder} ({e.strerror}); name another.") from None
    with file:
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"out: another run is writing into {folder}; wait until it has ended, or name another folder.") from None
        except OSError:
            pass  # a file system without locks
        yield


@kinds.takes(folder=kinds.PLACE, tensors=kinds.Kind("a dict of tensors", _are_tensors), facts=kinds.MAPPING)
def save(folder: str | Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Writes `tensors` (any shape and device; they may share memory) and `facts` (what JSON can hold, and NaN) into `folder`, in the place
    of the checkpoint that is there. OSError in one sentence where it cannot be written: then the earlier one stands."""
    folder, name, digest, placed = Path(folder), None, None, False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if tensors:
            name = f"checkpoint-{secrets.token_hex(8)}.safetensors"
            with replacing(folder / name) as part:
                write_tensors(tensors, part)
                with open(part, "rb") as file:
                    digest = _sha256(iter(lambda: file.read(2**20), b""))
        text = json.dumps({**facts, "format": FORMAT, "tensors": name, "sha256": digest}, default=_listed)
        with replacing(folder / NAME) as part:
            part.write_text(f'{{"sha256": "{_sha256([text.encode()])}", "checkpoint": {text}}}\n')
        placed = True
    except OSError as e:
        raise OSError(f"checkpoint: it cannot be written into {folder} ({e.strerror or e}); the one before it, if any, stands.") from None
    finally:
        if name is not None and not placed:
            (folder / name).unlink(missing_ok=True)
    for old in [*folder.glob(f"checkpoint-{'[0-9a-f]' * 16}.safetensors"), *folder.glob("checkpoint*.part")]:
        if old.name != name:
            old.unlink(missing_ok=True)


@kinds.takes(folder=kinds.PLACE)
def load(folder: str | Path) -> tuple[dict[str, Tensor], Facts]:
    """The tensors, on the CPU, and the facts of the checkpoint in `folder`. ValueError in one sentence where there is none, or where one
    byte of it is not what was written."""
    path = Path(folder) / NAME
    what = f"checkpoint: {folder} holds one that is damaged (%s); take a copy of it from before, or begin the run anew."
    try:
        whole = json.loads(path.read_bytes())
        facts = whole["checkpoint"]
        if whole["sha256"] != _sha256([json.dumps(facts).encode()]):
            raise ValueError
    except FileNotFoundError:
        raise ValueError(f"checkpoint: expected a folder that holds one, got {folder}, which has no {NAME}; check the name.") from None
    except OSError as e:
        raise ValueError(f"checkpoint: {path} cannot be read ({e.strerror}).") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(what % f"{NAME} was altered or cut off") from None
    if facts["format"] != FORMAT:
        raise ValueError(f"checkpoint: expected format {FORMAT}, got {facts['format']} in {folder}; take the pflcore that wrote it.")
    if facts["tensors"] is None:
        return {}, facts
    try:
        data = (path.parent / Path(facts["tensors"]).name).read_bytes()
    except OSError as e:
        raise ValueError(what % f"{facts['tensors']}: {e.strerror}") from None
    if _sha256([data]) != facts["sha256"]:
        raise ValueError(what % f"{facts['tensors']} was altered, cut off or exchanged")
    library = _safetensors()
    try:
        return {k: v.clone() for k, v in library.load(data).items()}, facts  # clones: aligned as torch aligns
    except Exception as e:  # written by somebody else, with a digest that fits
        raise ValueError(what % f"{facts['tensors']} is no safetensors file: {' '.join(str(e).split())}") from None


def load_states(path: Path, device: str = "cpu") -> dict[str, Any]:
    """Trained states that `torch.save` wrote, read without running what is in them. ValueError in one sentence where they are damaged."""
    try:
        saved: dict[str, Any] = torch.load(path, weights_only=True, map_location=device)
    except Exception as e:  # torch raises many kinds
        raise ValueError(f"folder: {path} is damaged ({type(e).__name__}); remove it, and what it holds is trained again.") from None
    return saved


def _listed(value: Any) -> Any:
    """A callback's number or array of NumPy or torch, for JSON."""
    return value.tolist() if hasattr(value, "tolist") else repr(value)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside `path` to be written, which takes its place once it is whole and on the disk; where the block fails it is removed."""
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")  # where nobody can have put a link
    try:
        yield part
        _sync(part)
        part.replace(path)
        with contextlib.suppress(OSError):  # not every file system, nor Windows, syncs a folder; the file is in its place
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
    """Writes a safetensors file. OSError where the disk will not take it, TypeError for a dtype that the format does not have."""
    library = _safetensors()
    flat: dict[str, Tensor] = {}
    memory: set[int] = set()
    for name, t in tensors.items():
        t = t.detach().cpu().contiguous()
        flat[name] = t.clone() if t.untyped_storage().data_ptr() in memory else t  # the format has no shared memory
        memory.add(flat[name].untyped_storage().data_ptr())
    try:
        library.save_file(flat, path)
    except KeyError as e:
        raise TypeError(f"checkpoint: safetensors holds no {e.args[0]}; keep the state in another dtype.") from None
    except Exception as e:
        if isinstance(e, OSError) or type(e).__name__ != "SafetensorError":
            raise
        raise OSError(str(e)) from None


def _sha256(pieces: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError:
        raise ImportError("checkpoint: it needs safetensors, which is not installed; get it with: pip install safetensors.") from None
    return safetensors.torch


# which run a checkpoint is of ------------------------------------------------------------------------------------------------
def facts_of(value: Any) -> Any:
    """`value` as it comes back from JSON, with functions by their names: {"function": name}."""

    def other(v: Any) -> Any:
        return v.tolist() if isinstance(v, Tensor) else {"function": getattr(v, "__name__", type(v).__name__)}

    return json.loads(json.dumps(value, default=other))


def of_data(data: Federation) -> Facts:
    """Which federation it is."""
    content = {f.name: getattr(data, f.name) for f in fields(data) if f.name not in ("name", "notes")}
    return {"clients": data.n, "training samples": data.size("train").tolist(), "digest of the samples": digest_of(content)}


def of_net(net: Net) -> Facts:
    """Which model it is, its loss with it: names and shapes of what is trained, and the digest of what is not and so stands in no state."""
    rows = {*net.names, *net.buffer_names}
    every = [*net.module.named_parameters(), *net.module.named_buffers()]
    constants = {k: v for k, v in every if k not in rows and not k.endswith("num_batches_tracked")}  # which nobody reads
    shapes = zip([*net.names, *net.buffer_names], [*net.shapes, *net.buffer_shapes], strict=True)
    loss = {k: v for k, v in vars(net.criterion).items() if k != "training"} if isinstance(net.criterion, nn.Module) else {}
    return {
        "dtype": str(net.dtype),
        "shapes": {k: list(s) for k, s in shapes},
        "layers": {k or "model": _described(m) for k, m in net.module.named_modules()},
        "digest of the loss": digest_of(loss),
        "digest of what is not trained": digest_of(constants),
    }


def _described(m: nn.Module) -> str:
    """A layer by its options, a module of layers by its class."""
    return type(m).__name__ if list(m.children()) else _named(repr(m))


def _named(text: str) -> str:
    """A repr without the addresses of memory, which are others in every process."""
    return re.sub(" at 0x[0-9a-f]+", "", text)


def brief(thing: Any) -> str:
    """A digest to tell things apart by in words."""
    return digest_of(thing)[:6]


def digest_of(thing: Any) -> str:
    """A digest of tensors, and whatever else has a repr, in dicts and lists."""
    digest = hashlib.sha256()

    def add(thing: Any) -> None:
        if isinstance(thing, Tensor):
            digest.update(f"{thing.dtype}{list(thing.shape)}".encode())
            rows = thing[:: max(1, thing.nbytes // LARGE)] if thing.dim() else thing
            digest.update(rows.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        elif isinstance(thing, Ragged):
            add(thing.flat)
            add(thing.begin)
        elif isinstance(thing, Mapping):
            for key in sorted(thing):
                digest.update(f"{key}:".encode())
                add(thing[key])
        elif isinstance(thing, list | tuple):
            digest.update(f"{len(thing)}:".encode())
            for one in thing:
                add(one)
        else:
            digest.update(_named(repr(thing)).encode())

    add(thing)
    return digest.hexdigest()[:16]


def difference(there: Any, here: Any, name: str = "") -> str | None:
    """The first thing in which two sets of facts differ, in words; None where they are the same."""
    if isinstance(there, dict) and isinstance(here, dict):
        keys = [*there, *(k for k in here if k not in there)]
        return next(filter(None, (difference(there.get(k), here.get(k), str(k)) for k in keys)), None)
    return None if there == here else f"{name} is {_short(there)} there and {_short(here)} here"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:56]} ..."
