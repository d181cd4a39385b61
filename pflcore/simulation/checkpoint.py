"""Checkpoints: what a run needs to go on, in a folder, whole or not there at all.

`checkpoint.safetensors` holds the tensors, and in its metadata what the run is, where
it stands and the digest of it all. It is written beside its place, synced and renamed
into it: until then the earlier checkpoint is the one that counts. Nothing is pickled:
to read a checkpoint runs nobody's code.
"""

import contextlib
import hashlib
import json
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from pflcore.algorithms._protocol import Algorithm
from pflcore.check import (
    NonNegativeFloat,
    NonNegativeInt,
    checked,
    reject,
    require,
    summarize,
)
from pflcore.results._files import atomic_write, remove_part_files
from pflcore.results.record import to_json
from pflcore.simulation._describe import Record, first_difference, identity
from pflcore.simulation._uploads import non_finite_names
from pflcore.simulation.round import (
    RunConfig,
    State,
    check_state,
    client_row_names,
    flatten_state,
    initial_state,
    load_state_dict,
    state_dict,
    unflatten_state,
)
from pflcore.train import Net

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["Checkpoint", "load"]
FORMAT_VERSION = 4
RECORD_FIELD_TYPES = {  # what is read of a record
    "round": (int,),
    "cohort": (list,),
    "dropped": (list,),
    "relative_update_norm": (list, type(None)),
    "report": (dict,),
    "eval": (dict, type(None)),
}
FILE_NAME = "checkpoint.safetensors"
DIGEST_PLACEHOLDER = f"{'sha256':*^64}"  # stands where the digest of the file will be
DAMAGED_TEXT = (
    "checkpoint: {} holds one that is damaged (it was altered, cut off or exchanged); "
    "take a copy "
    "of it from before, or begin the run anew."
)


@checked
@dataclass
class Checkpoint:
    """Where and when a run leaves what it needs to go on: after every `every` rounds or
    `minutes`, whichever comes first; 0 is never.

    >>> simulation.run(checkpoint=Checkpoint("runs/mine", every=10))   # doctest: +SKIP
    """

    folder: str | Path
    every: NonNegativeInt = 0  # rounds
    minutes: NonNegativeFloat = 10.0
    _since: float = field(default_factory=time.monotonic, init=False, repr=False)

    @property
    def exists(self) -> bool:
        """Whether the folder holds a checkpoint."""
        return (Path(self.folder) / FILE_NAME).exists()

    def due(self, round: int) -> bool:
        """Whether it is time for a checkpoint after `round`; the minutes count from
        when it last was."""
        by_time = 0 < self.minutes <= (time.monotonic() - self._since) / 60
        if not (by_time or (self.every and round % self.every == 0)):
            return False
        self._since = time.monotonic()
        return True


@checked
@contextlib.contextmanager
def lock(folder: str | Path) -> Iterator[None]:
    """Keeps other runs out of `folder`, which is made, until the block or the process
    ends, however that ends. ValueError where another run is in it, or where nothing can
    be written there."""
    path = Path(folder) / ".lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "ab")  # noqa: SIM115 (closed below)
    except OSError:
        reject("out", "a folder that can be written", str(folder))
    with file:
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"out: another run is writing into {folder}; wait until it has ended, "
                "or name "
                "another folder."
            ) from None
        except OSError:
            pass  # a file system without locks
        yield


@checked
def save(
    folder: str | Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
) -> None:
    """Writes `tensors` ([...], on any device, in memory of their own) and `facts` (what
    JSON can hold, and NaN) into `folder`, instead of the checkpoint that is there.
    OSError in one sentence where it cannot be written: then the earlier one stands."""
    path = Path(folder, FILE_NAME)
    try:
        text = json.dumps({**facts, "format": FORMAT_VERSION}, default=to_json)
    except (TypeError, ValueError, RecursionError) as e:
        # what a callback put into a record
        raise OSError(
            f"checkpoint: it cannot be written into {folder}, because a record holds "
            "what JSON "
            f"does not ({e}); the one before it, if any, stands."
        ) from None
    data = safetensors_bytes(tensors, {"facts": text, "sha256": DIGEST_PLACEHOLDER})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as part:
            part.write_bytes(
                data.replace(DIGEST_PLACEHOLDER.encode(), _digest(data).encode(), 1)
            )
    except OSError as e:
        raise OSError(
            f"checkpoint: it cannot be written into {folder} ({e.strerror or e}); the "
            "one before "
            "it, if any, stands."
        ) from None
    remove_part_files(path)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@checked
def load(folder: str | Path) -> tuple[dict[str, Tensor], Record]:
    """The tensors [...], on the CPU, and the facts of the checkpoint in `folder`.
    ValueError in one sentence where there is none, or where one byte of it is not what
    was written."""
    import safetensors.torch

    try:
        data = Path(folder, FILE_NAME).read_bytes()
    except OSError as e:
        raise ValueError(
            f"checkpoint: expected a folder that holds one, got {folder}, which has no "
            f"{FILE_NAME} that "
            f"can be read ({e.strerror}); check the name."
        ) from None
    try:
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])[
            "__metadata__"
        ]
        if (
            _digest(
                data.replace(header["sha256"].encode(), DIGEST_PLACEHOLDER.encode(), 1)
            )
            != header["sha256"]
        ):
            raise ValueError
        facts: Record = json.loads(header["facts"])
        written_in = facts["format"]
        tensors = safetensors.torch.load(data)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(DAMAGED_TEXT.format(folder)) from None
    if written_in != FORMAT_VERSION:
        raise ValueError(
            f"checkpoint: expected format {FORMAT_VERSION}, got "
            f"{summarize(written_in)} in {folder}; take the "
            "pflcore that wrote it."
        )
    # clones: aligned as torch aligns
    return {k: v.clone() for k, v in tensors.items()}, facts


def safetensors_bytes(
    tensors: Mapping[str, Tensor], about: dict[str, str] | None = None
) -> bytes:
    """A safetensors file. TypeError for a dtype that the format does not have."""
    import safetensors.torch

    try:
        return safetensors.torch.save(
            {k: v.detach().cpu().contiguous() for k, v in tensors.items()}, about
        )
    except KeyError as e:
        raise TypeError(
            f"checkpoint: safetensors holds no {e.args[0]}; keep the state in another "
            "dtype."
        ) from None


# a run's ----------------------------------------------------------------------


def save_run(folder: str | Path, run: Any) -> None:
    """Writes the checkpoint of a run, a `Simulation`. OSError where that cannot be."""
    net = run.context.net
    state = run._state
    rounds = []
    tensors = state_dict(run.algorithm, state) | {"net.w0": net.w0, "net.b0": net.b0}
    for record in run._records:
        long = {k: v for k, v in record["report"].items() if isinstance(v, Tensor)}
        tensors |= {f"report.{record['round']}.{k}": v for k, v in long.items()}
        rounds.append({**record, "report": record["report"] | dict.fromkeys(long)})
    where = {"round": state.round, "void": state.void_rounds, "rounds": rounds}
    save(folder, tensors, {"run": identity(run), **where})


def restore_run(folder: str | Path, run: Any) -> tuple[RunConfig, State, list[Record]]:
    """What a run, a `Simulation`, takes up from its checkpoint: where it started, its
    state and the records. ValueError where it is another run's, a warning where it was
    made elsewhere."""
    tensors, facts = load(folder)
    there = facts.get("run")
    here = identity(run)
    there = there if isinstance(there, dict) else {}
    made_with, made_here = (what.pop("made_with", {}) for what in (there, here))
    if differs := first_difference(there, here):
        raise ValueError(
            f"checkpoint: {folder} holds that of another run: {differs}; give what it "
            "was made "
            "with, or another folder."
        )
    if other := first_difference(made_with, made_here):
        last = "numbers may differ in their last digits from an unbroken run's."
        warnings.warn(f"checkpoint: {other}; {last}", stacklevel=3)
    try:
        reports = {k: tensors.pop(k) for k in [*tensors] if k.startswith("report.")}
        records = _restore_records(facts, reports, run.rounds)
        net = _restore_net(tensors, run.context.net)
        begun = initial_state(run.algorithm, net, run.data.n, run.config.folder)
        _check_state(tensors, begun, run.algorithm, net)
    except ValueError as e:
        raise ValueError(
            f"checkpoint: {folder} holds one that this run did not write "
            f"({str(e).rstrip('.')}); "
            "take a copy of it from before, or begin the run anew."
        ) from None
    config = run.config._replace(context=run.context._replace(net=net))
    state = load_state_dict(
        run.algorithm, begun, tensors, facts["round"], facts["void"]
    )
    return config, state, records


def _restore_records(
    facts: Record, reports: Mapping[str, Tensor], rounds: int
) -> list[Record]:
    """The rounds' records, with what stands in tensors of their own. ValueError where
    facts are none of a run of so many rounds."""
    played: Any = facts.get("round")
    void: Any = facts.get("void")
    records: Any = facts.get("rounds")
    require(
        type(played) is int and 0 <= played <= rounds,
        "round",
        f"at most {rounds}",
        played,
    )
    require(
        type(void) is int and 0 <= void <= played, "void", f"at most {played}", void
    )
    require(isinstance(records, list), "rounds", "a list of records", records)
    for record in records:
        fits = isinstance(record, dict) and all(
            type(record.get(name)) in kinds
            for name, kinds in RECORD_FIELD_TYPES.items()
        )
        require(fits, "rounds", f"records with {', '.join(RECORD_FIELD_TYPES)}", record)
    by_round = {record["round"]: record["report"] for record in records}
    known = len(by_round) == len(records) and all(
        0 < round <= played for round in by_round
    )
    require(known, "rounds", f"each round up to {played} once", [*by_round])
    for name, tensor in reports.items():
        _, round, key = [*name.split(".", 2), ""][:3]
        require(
            round.isdecimal() and int(round) in by_round,
            name,
            "a round's report",
            tensor,
        )
        by_round[int(round)][key] = tensor
    return list(records)


def _restore_net(tensors: dict[str, Tensor], template: Net) -> Net:
    """A model of its own that starts where the run did, taken out of the tensors."""
    net = template.to(template.w0.device)
    for name in ("w0", "b0"):
        want = getattr(template, name)
        found = tensors.pop(f"net.{name}", None)
        fits = found is not None and (found.dtype, found.shape) == (
            want.dtype,
            want.shape,
        )
        require(fits, f"net.{name}", summarize(want), found)
        setattr(net, name, found.to(template.w0.device))  # type: ignore[union-attr]
    return net


def _check_state(
    tensors: Mapping[str, Tensor], initial: State, alg: Algorithm, net: Net
) -> None:
    """ValueError where tensors are none of a `state_dict` of a run that began so: forms
    as for a state that is set, and finite numbers as every round leaves them."""
    n = len(initial.participated)
    own = client_row_names(alg, initial)
    seen = tensors.get("seen")
    fits = seen is not None and (seen.dtype, seen.shape) == (
        initial.participated.dtype,
        initial.participated.shape,
    )
    require(fits, "seen", summarize(initial.participated), seen)
    count = int(seen.sum())  # type: ignore[union-attr]
    whole = dict(tensors)
    for name in own & {*tensors}:
        rows = tensors[name]
        require(
            rows.dim() and len(rows) == count, name, f"rows of {count} clients", rows
        )
        whole[name] = rows.new_zeros(()).expand(n, *rows.shape[1:])
    for name in ("batch_norm", *(f"clients.{k}" for k in initial.clients)):
        require(name in tensors, name, "a tensor of clients' rows", None)
    check_state(unflatten_state(whole, 0), alg, net, n)
    fresh = flatten_state(initial)
    names = {
        k
        for k in tensors
        if k in own or not non_finite_names({k: fresh.get(k, net.w0)})
    }
    broken = non_finite_names({k: v for k, v in tensors.items() if k in names})
    for name in broken:
        reject(name, "finite numbers", tensors[name])
