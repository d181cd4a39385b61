"""Descriptions of a run, of its rounds, its engine, its data and its model.

`describe_run` makes the one description of a run: the header of its record, by which a
checkpoint tells runs apart, too.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pflcore.algorithms import name_of
from pflcore.algorithms._split import SplitModel
from pflcore.check import name_few, summarize
from pflcore.data._federation import Federation
from pflcore.data._ragged import Ragged
from pflcore.ops import __version__, backend
from pflcore.robust import Private, mean_in
from pflcore.simulation._functions import function_digest
from pflcore.simulation._sampling import describe_sampling, sampling_kind
from pflcore.simulation._state import RunConfig, State
from pflcore.simulation._updates import OUTLIER_RATIO, longest_update
from pflcore.simulation._uploads import RoundOutcome
from pflcore.simulation.record import to_json
from pflcore.train import Net
from pflcore.train._context import TrainContext
from pflcore.train._gpu_flags import allows_tf32
from pflcore.train._losses import loss_name
from pflcore.train._random import STREAM_VERSION

if TYPE_CHECKING:
    from pflcore.simulation._loop import Simulation

Record = dict[str, Any]
# Of a tensor with more bytes, a digest takes rows in even distances.
DIGEST_MAX_BYTES = 2**28
# A report keeps a tensor of more numbers as a tensor, not as a list.
REPORT_TENSOR_MIN_NUMBERS = 1000
# Entries of a header in which runs with the same results may differ. They describe
# where a run is computed, or what another entry has in more detail. A checkpoint brings
# its own initial weights.
MAY_DIFFER = (
    "initial_weights",
    "engine",
    "path",
    "device",
    "clients_per_block",
    "backend",
    "versions",
    "tf32",
    "names",
)
# Entries that differ between runs of different lengths.
OF_LENGTH = ("rounds", "learning_rates")
# Those entries of MAY_DIFFER that may change the last digits of results.
LAST_DIGITS = ("versions", "device", "engine", "clients_per_block", "tf32")
# Fields of a federation that decide no result.
NO_SAMPLES = ("name", "facts", "columns", "class_names")
VERSIONS = {"pflcore": __version__, "torch": torch.__version__}
# Keys of records that are also names of an attribute: of the options, of an outcome.
RUN_FIELDS = ("training", "clients", "rounds", "participation", "seed")
OUTCOME_FIELDS = ("dropped", "void", "bytes_down", "bytes_up", "train_loss", "clipped")


def describe_run(simulation: Simulation) -> Record:
    """The first line of a run's record, and the description in its checkpoint.

    Runs that differ in nothing but `MAY_DIFFER` have the same results, up to their last
    digits. Data without a name, models, and losses with options have a short digest,
    which tells them apart for people.
    """
    config = simulation.config
    alg = config.algorithm
    net = config.net
    data = config.data
    adversary = config.robustness.adversary
    record = {
        "algorithm": name_of(alg),
        "options": alg,
        **{name: getattr(simulation, name) for name in RUN_FIELDS},
        "data": _data_name(data),
        "model": _model_name(net),
        "eval_clients": _evaluated_clients(simulation),
        "n": data.n,
        "classes": data.classes,
        "facts": data.facts,
        "parameters": net.size,
        "initial_weights": short_digest([net.w0, net.b0]),
        "engine": config.engine.kind,
        "path": describe_engine(config),
        "device": simulation.hardware.device,
        "clients_per_block": config.clients_per_block,
        "batch_norm": config.batch_norm,
        "clip": config.robustness.clip,
        "stream": STREAM_VERSION,
        "loss": _loss_name_with_digest(net.loss_fn),
        "metrics": list(simulation.metrics),
        "eval_split": simulation.evaluation.split,
        "evaluation": simulation.evaluation,
        "target": getattr(alg, "target", None),
        "backend": backend(),
        "versions": VERSIONS,
    }
    mean = mean_in(alg)
    if isinstance(mean, Private):
        record["noise_multiplier"] = mean.noise_multiplier
    if config.training.schedule is not None:
        record["learning_rates"] = config.training.step_sizes(config.rounds)
    if sampling_kind(simulation.sampling) != "uniform":
        record["sampling"] = describe_sampling(simulation.sampling)
    if data.names is not None:
        record["names"] = data.names
    if net.eval_modules:
        record["eval_modules"] = net.eval_modules
    if net.w0.device.type == "cuda":
        record["tf32"] = allows_tf32()
    if isinstance(alg, SplitModel):
        record["private"] = _private_parameters(alg, net)
    if adversary is not None:
        record["adversary"] = {**asdict(adversary), "strength": adversary.factor}
    if simulation.functions:
        record["functions"] = simulation.functions
    digests = {
        "digest of the samples": describe_data(data)["digest of the samples"],
        "digest of the model": content_digest(describe_net(net)),
    }
    sizes = data.size("train").tolist()
    return {**to_json(record), "size": sizes, "digests": digests}


def _evaluated_clients(simulation: Simulation) -> Tensor | int | None:
    """The clients to evaluate, for the header.

    None or a number is kept as in the options; else it is the ids.
    """
    clients = simulation.evaluation.clients
    if clients is None or isinstance(clients, int):
        return clients
    return simulation.eval_clients


def decisive_entries(header: Record) -> Record:
    """The entries of a header that decide the results of the run."""
    return {name: value for name, value in header.items() if name not in MAY_DIFFER}


def explain_other_run(
    there: Record, here: Record, config: RunConfig, played: int
) -> str | None:
    """The first difference that keeps a run from going on, in words.

    None where it can go on. The number of rounds may differ where the rounds so far
    would have been the same.

    Args:
        there: The header of the other run.
        here: The header of this run.
        config: The options of this run.
        played: The number of rounds that the other run has played.
    """
    if there.get("rounds") == here["rounds"]:
        return first_difference(decisive_entries(there), decisive_entries(here))
    difference = first_difference(
        entries_of_any_length(there), entries_of_any_length(here)
    )
    if difference is not None:
        return difference
    reason = _reason_for_rounds(there, here, config, played)
    if reason is None:
        return None
    return f"rounds is {there.get('rounds')} there and {here['rounds']} here, {reason}"


def entries_of_any_length(header: Record) -> Record:
    """The decisive entries that runs of different lengths may share."""
    entries = decisive_entries(header)
    return {name: value for name, value in entries.items() if name not in OF_LENGTH}


def _reason_for_rounds(
    there: Record, here: Record, config: RunConfig, played: int
) -> str | None:
    """The reason why runs of two lengths differ so far, as a clause.

    None where they are the same. The arguments are those of `explain_other_run`.
    """
    reason = config.algorithm.traits.rounds_reason
    if played > here["rounds"]:
        return f"and {played} are played"
    if reason:
        return f"and {name_of(config.algorithm)} {reason}"
    rates = [run.get("learning_rates", [])[:played] for run in (there, here)]
    is_same = rates[0] == rates[1]
    return None if is_same else "and the schedule's step sizes depend on it"


def difference_in_digits(there: Record, here: Record) -> str | None:
    """The first difference of two headers that may change last digits, in words."""
    return first_difference(_made_with(there), _made_with(here))


def _made_with(header: Record) -> Record:
    """The entries of a header that may change last digits."""
    return {name: header[name] for name in LAST_DIGITS if name in header}


def _data_name(data: Federation) -> str:
    """The name of a federation; the default name "data" with a digest."""
    if data.name != "data":
        return data.name
    return f"data {short_digest([data.x, data.y])}"


def _model_name(net: Net) -> str:
    """The class of a model, with a digest of its layers."""
    layers = describe_net(net)["layers"]
    return f"{type(net.module).__name__} {short_digest(layers)}"


def _loss_name_with_digest(loss_fn: Any) -> str:
    """The name of a loss, with a digest for a module.

    The digest tells modules with different options apart.
    """
    name = loss_name(loss_fn)
    if isinstance(loss_fn, nn.Module):
        name += f" {function_digest(loss_fn).text[:6]}"
    return name


def _private_parameters(alg: SplitModel, net: Net) -> list[str]:
    """The names of the parameters that stay with their client."""
    mask = alg.private_mask(net)
    return [name for name, columns in net.slices.items() if mask[columns.start]]


def describe_engine(context: TrainContext) -> Record:
    """The engine that trains the model, with the reason for it.

    On a GPU it also says whether local steps were captured as CUDA graphs so far.
    """
    engine = context.engine
    path = {"how": engine.words, "why": engine.reason}
    if context.graphs is not None:
        path["graphs"] = context.graphs.summary
    return path


def round_record(config: RunConfig, state: State, outcome: RoundOutcome) -> Record:
    """A round's record, without the algorithm's report and without evaluation."""
    norms = outcome.relative_update_norm
    if norms is not None:
        norms = [_three_digits(norm) for norm in norms]
    training = config.training
    steps: Record = {}
    if callable(training.steps):
        ids = torch.tensor(outcome.ids, dtype=torch.int64)
        counts = training.steps_of(state.round, ids, config.seed)
        steps = {"steps": [] if counts is None else counts.tolist()}
    if config.graphs is not None:
        steps["replayed"] = config.graphs.replays
    return {
        "round": state.round,
        "algorithm": name_of(config.algorithm),
        "engine": config.engine.kind,
        "seed": config.seed,
        "seconds": 0.0,
        "cohort": outcome.ids,
        **steps,
        **{name: getattr(outcome, name) for name in OUTCOME_FIELDS},
        "relative_update_norm": norms,
        "report": {},
        "eval": None,
    }


def _three_digits(number: float | None) -> float | None:
    """The number rounded to three significant digits; None stays None."""
    return None if number is None else float(f"{number:.3g}")


def round_report(config: RunConfig, state: State, outcome: RoundOutcome) -> Record:
    """The algorithm's report of a round.

    Small tensors are lists in it, and large ones are copies on the CPU.
    """
    if outcome.void or outcome.cohort is None:  # the round changed nothing
        return {}
    report = config.algorithm.report(state.server, outcome.mix, outcome.cohort)
    record: Record = {}
    for name, tensor in report.items():
        if tensor.numel() > REPORT_TENSOR_MIN_NUMBERS:
            record[name] = tensor.detach().cpu().clone()
        else:
            record[name] = tensor.tolist()
    return record


def explain_void(
    config: RunConfig, state: State, records: Sequence[Record], outcome: RoundOutcome
) -> str:
    """One sentence with the reason why a run ends after void rounds.

    It names the longest update so far, where that is an outlier.

    Args:
        config: The options of the run.
        state: The state after the last round.
        records: The records of the rounds so far.
        outcome: The outcome of the last round.
    """
    last = state.round
    first = last - state.void_rounds + 1
    rounds = f"round {last} was" if first == last else f"rounds {first} to {last} were"
    if outcome.void_reason is not None:
        return f"{rounds.capitalize()} void: {outcome.void_reason}"
    data = config.data
    dropped = name_few(data.names_of(outcome.dropped))
    reason = f"client(s) {dropped} sent updates that are not finite"
    if outcome.non_finite_state:
        names = ", ".join(outcome.non_finite_state)
        reason = f"the server's {names} would not be finite"
    remedy = f"lower the learning rate ({config.training.lr})"
    longest = longest_update(records)
    if longest is not None and longest.ratio > OUTLIER_RATIO:
        (name,) = data.names_of([longest.client])
        remedy = (
            f"client {name}'s update was {longest.ratio:.3g} times the "
            f"median in round {longest.round}: look at its data or set clip"
        )
    return f"The run diverged: {rounds} void, because {reason}; {remedy}."


def describe_data(data: Federation) -> Record:
    """The description that tells federations apart, whatever their names."""
    names = [f.name for f in fields(data) if f.name not in NO_SAMPLES]
    contents = {name: getattr(data, name) for name in names}
    return {
        "clients": data.n,
        "training samples": data.size("train").tolist(),
        "digest of the samples": content_digest(contents),
    }


def describe_net(net: Net) -> Record:
    """The description that tells models apart; `describe_functions` has their code.

    It has the names and shapes of trained parameters and of batch norm's statistics.
    Tensors that are not trained are in no state, so a digest stands for them.
    """
    names = net.names + net.buffer_names
    shapes = dict(zip(names, net.shapes + net.buffer_shapes, strict=True))
    return {
        "dtype": str(net.dtype),
        "shapes": shapes,
        "layers": _describe_layers(net.module),
        "digest of what is not trained": content_digest(_untrained_tensors(net)),
    }


def _describe_layers(module: nn.Module) -> dict[str, str]:
    """Each layer by its options; a module of layers by its class."""
    layers = {}
    for name, layer in module.named_modules():
        has_layers = bool(list(layer.children()))  # an empty `Sequential` is falsy
        description = type(layer).__name__ if has_layers else _stable_repr(layer)
        layers[name or "model"] = description
    return layers


def _untrained_tensors(net: Net) -> dict[str, Tensor]:
    """Parameters and buffers that are not trained and are no batch-norm statistics.

    Batch norm's counts of batches are left out: nothing reads them.
    """
    state_names = {*net.names, *net.buffer_names}
    tensors = [*net.module.named_parameters(), *net.module.named_buffers()]
    return {
        name: tensor
        for name, tensor in tensors
        if name not in state_names and not name.endswith("num_batches_tracked")
    }


def _stable_repr(value: Any) -> str:
    """The repr without addresses in memory, which differ between processes."""
    return re.sub(" at 0x[0-9a-f]+", "", repr(value))


def short_digest(value: Any) -> str:
    """The first digits of a digest, for names that people read."""
    return content_digest(value)[:6]


def content_digest(value: Any, *, sampled: bool = True) -> str:
    """A digest of tensors and other values, in dicts and lists.

    A value that is no tensor counts by its repr.

    Args:
        value: The tensors and values.
        sampled: Takes rows in even distances of a tensor of more than
            `DIGEST_MAX_BYTES`, and else all of them.
    """
    digest = hashlib.sha256()

    def add(value: Any) -> None:
        """Adds a value to the digest, together with its form."""
        if isinstance(value, Tensor):
            digest.update(f"{value.dtype}{list(value.shape)}".encode())
            digest.update(_digest_bytes(value, sampled))
        elif isinstance(value, Ragged):
            add([value.flat, value.begin])
        elif isinstance(value, Mapping):
            items = []
            for key in sorted(value):
                items += [key, value[key]]
            add(items)
        elif isinstance(value, list | tuple):
            digest.update(f"{len(value)}:".encode())
            for item in value:
                add(item)
        else:
            digest.update(_stable_repr(value).encode())

    add(value)
    return digest.hexdigest()[:16]


def _digest_bytes(tensor: Tensor, sampled: bool) -> memoryview:
    """The bytes of a tensor that its digest takes, see `content_digest`."""
    if sampled and tensor.dim():
        stride = max(1, tensor.nbytes // DIGEST_MAX_BYTES)
        tensor = tensor[::stride]
    numbers = tensor.detach().cpu().contiguous().reshape(-1)
    return numbers.view(torch.uint8).numpy().data


def first_difference(
    there: Any, here: Any, name: str = "", places: tuple[str, str] = ("there", "here")
) -> str | None:
    """The first difference of two descriptions in words, if there is one.

    Args:
        there: The description of another run.
        here: The description of this run.
        name: The key under which both stand.
        places: The words for where each description comes from.
    """
    if not (isinstance(there, dict) and isinstance(here, dict)):
        if there == here:
            return None
        first, second = places
        return f"{name} is {summarize(there)} {first} and {summarize(here)} {second}"
    for key in {**there, **here}:
        difference = first_difference(there.get(key), here.get(key), str(key), places)
        if difference is not None:
            return difference
    return None
