"""What a run is: the one description that its record, its checkpoint and its header
line have."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from pflcore.algorithms._adaptation import SplitModel
from pflcore.check import summarize
from pflcore.data._federation import Federation
from pflcore.data._ragged import Ragged
from pflcore.metrics import human_bytes
from pflcore.ops import __version__, backend
from pflcore.results.record import OUTLIER_RATIO, to_json
from pflcore.simulation._setup import row_bytes
from pflcore.simulation._uploads import RoundOutcome
from pflcore.simulation.round import RunConfig
from pflcore.train import Net
from pflcore.train._gpu_flags import allows_tf32
from pflcore.train._losses import loss_name
from pflcore.train._random import STREAM_VERSION

Record = dict[str, Any]
# bytes of a tensor beyond which its digest looks at rows in even distances
DIGEST_MAX_BYTES = 2**28
REPORT_TENSOR_MIN_NUMBERS = 1000  # numbers from which a report is kept as a tensor
# of a header: where a run is computed, and what its identity says better
NOT_IDENTITY = ("storage", "backend", "peak_bytes", "loss", "size")
VERSIONS = {"pflcore": __version__, "torch": torch.__version__}
NO_OUTLIER = [0.0, 0, 0]
# a run's, by the same names
RUN_FIELDS = ("training", "clients", "rounds", "participation", "seed")
OUTCOME_FIELDS = ("dropped", "void", "bytes_down", "bytes_up", "train_loss", "clipped")


def header(run: Any) -> Record:
    """The first line of a run's record. Data without a name of their own, the model and
    a loss with options of its own have a digest in theirs."""
    context = run.context
    alg = run.algorithm
    robustness = run.robustness
    net = context.net
    engine = context.engine
    data = run.data
    split = run.evaluation.split
    looked_at = run.evaluation.clients
    criterion = net.loss_fn
    asked = looked_at is None or isinstance(looked_at, int)
    own = (
        f" {short_digest(vars(criterion))}" if isinstance(criterion, nn.Module) else ""
    )
    said = {
        "algorithm": run.name,
        "options": alg,
        **{k: getattr(run, k) for k in RUN_FIELDS},
        "data": data.name
        if data.name != "data"
        else f"data {short_digest([data.x, data.y])}",
        "model": f"{type(net.module).__name__} "
        f"{short_digest(describe_net(net)['layers'])}",
        "eval_clients": looked_at if asked else run.eval_clients,
        "n": data.n,
        "classes": data.classes,
        "facts": data.facts,
        "parameters": net.size,
        "engine": engine.name,
        "path": describe_engine(context),
        "device": run.hardware.device,
        "clients_per_block": context.clients_per_block,
        "storage": "disk" if run.config.folder else "memory",
        "batch_norm": run.batch_norm,
        "clip": robustness.clip,
        "stream": STREAM_VERSION,
        "loss": loss_name(criterion) + own,
        "metrics": list(run.metrics),
        "eval_split": split,
        "target": getattr(alg, "target", None),
        "backend": backend(),
        "versions": VERSIONS,
        "peak_bytes": run.peak_bytes(),
    }
    if net.w0.device.type == "cuda":
        said["tf32"] = allows_tf32()
    if isinstance(alg, SplitModel):  # the parameters that stay with their client
        columns = alg.private_mask(net)
        said["private"] = [n for n, s in net.slices.items() if columns[s.start]]
    if robustness.adversary is not None:
        said["adversary"] = robustness.adversary
    return {**to_json(said), "size": context.data.size("train").tolist()}


def describe_engine(context: Any) -> Record:
    """What trains the model, and why; on a GPU whether its steps are captured as
    CUDA graphs."""
    engine = context.engine
    path = {"engine": engine.name, "form": engine.form, "why": engine.reason}
    if context.graphs is not None:
        path["graphs"] = context.graphs.summary
    return path


def identity(run: Any) -> Record:
    """Which run it is, as a checkpoint says it: runs of the same give the same numbers;
    "made_with" may be another when it goes on."""
    said = header(run)
    made_with = {
        k: said.pop(k) for k in ("versions", "device", "engine", "clients_per_block")
    }
    made_with["form"] = said.pop("path")["form"]
    if "tf32" in said:
        made_with["tf32"] = said.pop("tf32")
    what: Record = to_json(
        {
            "federation": describe_data(run.data),
            "loss": loss_name(run.context.net.loss_fn),
            "net": describe_net(run.context.net),
            **{k: v for k, v in said.items() if k not in NOT_IDENTITY},
            "evaluation": run.evaluation,
            "made_with": made_with,
        }
    )
    return what


def round_record(run: Any, outcome: RoundOutcome) -> Record:
    """A round's record, without what the algorithm reports of it and its evaluation."""
    moved = outcome.relative_update_norm and [
        None if v is None else float(f"{v:.3g}") for v in outcome.relative_update_norm
    ]
    return {
        "round": run._state.round,
        "algorithm": run.name,
        "engine": run.context.engine.name,
        "seed": run.seed,
        "seconds": 0.0,
        "cohort": outcome.ids,
        **{k: getattr(outcome, k) for k in OUTCOME_FIELDS},
        "relative_update_norm": moved,
        "report": {},
        "eval": None,
    }


def round_report(run: Any, outcome: RoundOutcome) -> Record:
    """What the algorithm reports of a round: small tensors as lists, a long one as a
    copy."""
    if outcome.void:  # it changed nothing
        return {}
    said = run.algorithm.report(run._state.server, outcome.mix, outcome.cohort)
    return {
        k: v.detach().cpu().clone()
        if v.numel() > REPORT_TENSOR_MIN_NUMBERS
        else v.tolist()
        for k, v in said.items()
    }


def largest_update(record: Record) -> list[Any]:
    """The longest update of a round: how many times the median, whose, when."""
    pairs = zip(record["cohort"], record["relative_update_norm"] or [], strict=False)
    moved = [[ratio, i, record["round"]] for i, ratio in pairs if ratio is not None]
    return max(moved, default=NO_OUTLIER)


def explain_void(run: Any, outcome: RoundOutcome) -> str:
    """Why a run ends after void rounds, in one sentence, with the farthest update so
    far."""
    last = run._state.round
    first = run._state.round - run._state.void_rounds + 1
    which = f"round {last} was" if first == last else f"rounds {first} to {last} were"
    if outcome.void_reason is not None:
        return f"{which.capitalize()} void: {outcome.void_reason}"
    why = f"client(s) {outcome.dropped} sent updates that are not finite"
    if outcome.non_finite_state:
        why = f"the server's {', '.join(outcome.non_finite_state)} would not be finite"
    what = f"lower the learning rate ({run.training.lr})"
    far, client, when = max(map(largest_update, run._records), default=NO_OUTLIER)
    if far > OUTLIER_RATIO:
        moved = (
            f"client {client}'s update was {far:.3g} times the median in round {when}"
        )
        what = f"{moved}: look at its data or set clip"
    return f"The run diverged: {which} void, because {why}; {what}."


def memory_line(config: RunConfig, peak: int) -> str:
    """Where the clients' rows are, with bytes, and the memory that the run needs at
    its peak."""
    own, server = map(human_bytes, row_bytes(config)[:2])
    on_disk = f"in a file in {config.folder}, blocks only for clients that take part"
    place = on_disk if config.folder else "in memory"
    most = human_bytes(peak)
    kept = (
        f"rows: {own} of the clients' own and {server} of the server's for each, "
        f"{place}"
    )
    return f"{kept}; peak memory beside data about {most}"


def describe_data(data: Federation) -> Record:
    """Which federation it is."""
    names = [f.name for f in fields(data) if f.name not in ("name", "facts")]
    return {
        "clients": data.n,
        "training samples": data.size("train").tolist(),
        "digest of the samples": content_digest({k: getattr(data, k) for k in names}),
    }


def describe_net(net: Net) -> Record:
    """Which model it is, its loss with it: names and shapes of what is trained, and the
    digest of what is not and so stands in no state."""
    names = net.names + net.buffer_names
    forms = net.shapes + net.buffer_shapes
    shapes = dict(zip(names, forms, strict=True))
    every = [*net.module.named_parameters(), *net.module.named_buffers()]
    # but the counts of batches, which nobody reads
    rest = {
        k: v
        for k, v in every
        if k not in shapes and not k.endswith("num_batches_tracked")
    }
    loss = vars(net.loss_fn) if isinstance(net.loss_fn, nn.Module) else {}
    layers = {  # by its options, a module of layers by its class
        k or "model": type(m).__name__ if list(m.children()) else _stable_repr(m)
        for k, m in net.module.named_modules()
    }
    return {
        "dtype": str(net.dtype),
        "shapes": shapes,
        "layers": layers,
        "digest of the loss": content_digest(
            {k: v for k, v in loss.items() if k != "training"}
        ),
        "digest of what is not trained": content_digest(rest),
    }


def _stable_repr(thing: Any) -> str:
    """Its repr without the addresses of memory, which are others in every process."""
    return re.sub(" at 0x[0-9a-f]+", "", repr(thing))


def short_digest(thing: Any) -> str:
    """A digest to tell things apart by in words."""
    return content_digest(thing)[:6]


def content_digest(thing: Any) -> str:
    """A digest of tensors, and whatever else has a repr, in dicts and lists."""
    digest = hashlib.sha256()

    def add(thing: Any) -> None:
        if isinstance(thing, Tensor):
            digest.update(f"{thing.dtype}{list(thing.shape)}".encode())
            some = (
                thing[:: max(1, thing.nbytes // DIGEST_MAX_BYTES)]
                if thing.dim()
                else thing
            )
            flat = some.detach().cpu().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().data)
        elif isinstance(thing, Ragged):
            add([thing.flat, thing.begin])
        elif isinstance(thing, Mapping):
            add([part for key in sorted(thing) for part in (key, thing[key])])
        elif isinstance(thing, list | tuple):
            digest.update(f"{len(thing)}:".encode())
            for one in thing:
                add(one)
        else:
            digest.update(_stable_repr(thing).encode())

    add(thing)
    return digest.hexdigest()[:16]


def first_difference(there: Any, here: Any, name: str = "") -> str | None:
    """The first thing in which two descriptions differ, in words; None where they
    are the same."""
    if isinstance(there, dict) and isinstance(here, dict):
        found = (
            first_difference(there.get(k), here.get(k), str(k))
            for k in {**there, **here}
        )
        return next(filter(None, found), None)
    same = there == here
    return (
        None
        if same
        else f"{name} is {summarize(there)} there and {summarize(here)} here"
    )
