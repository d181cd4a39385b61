"""The beginning of a run: its options on their device, and its first state.

Other functions estimate the memory that a run needs at its peak, besides its data.

Symbols: N clients of the federation; S of them are evaluated.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from pflcore.algorithms._protocol import Algorithm
from pflcore.check import EXPECT_MODEL, client_id, ids_of, require
from pflcore.data._federation import Federation
from pflcore.data._protocols import leave_out_unlabelled, with_validation
from pflcore.data._samples import SPLITS
from pflcore.metrics import human_bytes
from pflcore.ops._chain import has_kernels
from pflcore.simulation._ranks import ONE_RANK, Ranks, find_ranks
from pflcore.simulation._settings import Evaluation, Hardware, Robustness
from pflcore.simulation._state import (
    RunConfig,
    State,
    batch_norm_policy,
    initial_state,
    kept_optimizer_state,
    new_client_state,
)
from pflcore.simulation._storage import check_disk_space
from pflcore.simulation.executor import AcrossRanks, Executor, InProcess, OneByOne
from pflcore.train import Net, Training
from pflcore.train import _memory as memory
from pflcore.train._context import TrainContext
from pflcore.train._engines import Engine
from pflcore.train._losses import Loss, default_loss, ignored_label
from pflcore.train._random import draw_without_replacement
from pflcore.train._select_engine import make_context
from pflcore.train._workers import Workers

# A model: with its loss, alone, or as a function that makes it.
ModelSource = Annotated[Net | nn.Module | Callable[[], nn.Module], EXPECT_MODEL]
# Options of algorithms that are a client, by its id or its name.
CLIENT_OPTIONS = ("target", "trusted_client")
# Rows of the size of a model that a run holds besides the state: the model of the user,
# the one that the run starts from, the copies of the threads, the rows of a kernel, and
# those that an allocator keeps after they are freed.
ROW_COPIES = 20
# Rows of a client that trains in vmap: its model, gradients and their temporaries.
VMAP_ROW_COPIES = 6
# Copies of a client's state: before the round, after it, and on the way to the server.
STATE_COPIES = 3


@dataclass(frozen=True)
class RunOptions:
    """The options of a `Simulation`, after they were checked.

    Attributes:
        algorithm: The algorithm, as an instance.
        model: A module with its loss, a module alone, or a function that makes one.
        data: The federation. `training_data` makes it fit for the run.
        training: The options of local training.
        rounds: The number of rounds.
        participation: The fraction of clients that take part in a round.
        clients: The ids of the clients that may take part, ascending; None for all.
        seed: The seed of all random numbers.
        evaluation: When, on what and for which clients models are evaluated.
        robustness: What is done about long updates, and clients that attack.
        hardware: Where the run is computed.
        batch_norm: The policy for running statistics, see `batch_norm_policy`.
        loss: The loss of a model that has none; None for the default of the targets.
        sampling: The rule by which the clients of a round are drawn, see
            `checked_sampling`.
    """

    algorithm: Algorithm
    model: ModelSource
    data: Federation
    training: Training
    rounds: int
    participation: float
    clients: Tensor | None
    seed: int
    evaluation: Evaluation
    robustness: Robustness
    hardware: Hardware
    batch_norm: str
    loss: Loss | None
    sampling: Any


def with_client_ids(algorithm: Algorithm, data: Federation) -> Algorithm:
    """The algorithm with the ids of clients that its options name.

    Raises ValueError where an option names no client of the federation.
    """
    ids = {}
    for option in CLIENT_OPTIONS:
        client = getattr(algorithm, option, None)
        if isinstance(client, str):
            ids[option] = client_id(option, client, data.n, data.names)
    return replace(algorithm, **ids) if ids else algorithm


def training_data(options: RunOptions) -> Federation:
    """The federation that a run trains on.

    It lacks the samples that the loss ignores, and the adversary has poisoned it. It
    has a split "val" where the algorithm needs one. Raises ValueError where it lacks
    the split of the evaluation.
    """
    model = options.model
    loss = options.loss or default_loss(options.data.y)
    if isinstance(model, Net):
        loss = model.loss_fn
    data: Federation = leave_out_unlabelled(options.data, ignored_label(loss))
    adversary = options.robustness.adversary
    if adversary is not None:
        data = adversary.poison_data(data)
    if options.algorithm.traits.needs_val:
        data = with_validation(data, options.seed)
    split = options.evaluation.split
    wanted = f"one of {', '.join(data.index)}"
    if split in SPLITS:
        wanted += f" (hold samples out with split({split}=0.2))"
    is_evaluated = options.evaluation.every != 0
    fits = split in data.index or not is_evaluated
    require(fits, "evaluation.split", wanted, split, data.index)
    return data


def select_eligible_clients(data: Federation, clients: Tensor | None) -> Tensor | None:
    """The ids of the clients that may take part, ascending; None for all.

    They have training samples. Raises ValueError where none of `clients` has.

    Args:
        data: The federation.
        clients: The ids, ascending, among which they are; None for all clients.
    """
    trainable = data.trainable_clients
    if clients is None or trainable is None:
        return trainable if clients is None else clients
    eligible = clients[torch.isin(clients, trainable)]
    names = data.names_of(clients.tolist())
    wanted = "a client with training samples"
    require(len(eligible), "clients", wanted, names)
    return eligible


def select_eval_clients(options: RunOptions) -> Tensor | None:
    """The ids [S], ascending, of the evaluated clients; None for all.

    Where the options have a number instead of ids, that many clients are drawn among
    the honest ones with samples.
    """
    choice = options.evaluation.clients
    data = options.data
    adversary = options.robustness.adversary
    if adversary is None:
        honest = torch.arange(data.n)
    else:
        honest = adversary.honest_clients(data.n)
    if choice is None:
        return None if adversary is None else honest
    if not isinstance(choice, int):
        ids = ids_of("evaluation.clients", choice, data.n, data.names)
        return ids.sort().values
    split = options.evaluation.split
    if split not in data.index:
        split = "train"
    candidates = honest[data.size(split)[honest] > 0]
    count = min(choice, len(candidates))
    drawn = draw_without_replacement(
        len(candidates), count, options.seed, "eval_clients"
    )
    return candidates[drawn].sort().values


def prepare_run(options: RunOptions, device: str) -> tuple[RunConfig, State]:
    """The constants of a run, on its device, and its first state.

    Raises MemoryError where they do not fit into memory. Raises ValueError where the
    model or the schedule of learning rates does not fit the run.
    """
    net = options.algorithm.prepare(_as_net(options))
    batch_norm_policy(options.algorithm, net, options.batch_norm)
    # A schedule that raises an error raises it here, before the first round.
    options.training.lr_at(1, options.rounds)
    try:
        return _prepare_run(options, net, device)
    except Exception as error:
        if not memory.is_out_of_memory(error) or isinstance(error, memory.RunTooLarge):
            raise
        request = memory.failed_request(error)
    # Only here, after the `except`: the error holds the tensors of its frames.
    memory.free_caches(device)
    data = options.data
    context = TrainContext(net, data, options.training, Engine("loop"), Workers(1))
    peak = peak_bytes(RunConfig(options.algorithm, context), options.participation)
    data_bytes = data.x.nbytes + data.y.nbytes
    where = f"before the first round, with {human_bytes(data_bytes)} of data"
    raise MemoryError(memory.out_of_memory_text(where, peak, request, device))


def _as_net(options: RunOptions) -> Net:
    """The model with its loss. Raises ValueError where two losses are given."""
    model = options.model
    if not isinstance(model, Net):
        loss = options.loss or default_loss(options.data.y)
        return Net(model, loss, seed=options.seed)
    if options.loss is not None:
        raise ValueError(
            "loss: this Net has a loss of its own; give it to the Net, Net(model, "
            "loss), or give the bare model."
        )
    return model


def _prepare_run(options: RunOptions, net: Net, device: str) -> tuple[RunConfig, State]:
    """The result of `prepare_run`, without a sentence on lacking memory."""
    hardware = options.hardware
    alg = options.algorithm
    data = options.data
    ranks = ONE_RANK
    if hardware.ranks == "auto":
        ranks = find_ranks(hardware.rank_timeout)
    executor = _select_executor(hardware, ranks)
    engine = hardware.engine
    workers = hardware.workers
    if isinstance(executor, OneByOne):
        engine = "loop"
        workers = 1
    if device != "cpu":
        net = net.to(device)
        data = data.to(device)
    context = make_context(
        net,
        data,
        options.training,
        engine,
        workers,
        options.seed,
        options.rounds,
        hardware.clients_per_block,
        hardware.graphs,
    )
    config = RunConfig(
        alg,
        context,
        options.robustness,
        options.batch_norm,
        executor=executor,
        ranks=ranks,
    )
    folder = storage_folder(config, hardware.storage, options.participation)
    config = config._replace(folder=folder)
    peak = peak_bytes(config, options.participation)
    memory.check_fits_memory(peak, device, adjustable_clients_per_block(context))
    state = initial_state(
        alg,
        context.net,
        data.n,
        folder,
        trainable_clients=data.trainable_clients,
        training=options.training,
    )
    return config, state


def _select_executor(hardware: Hardware, ranks: Ranks) -> Executor:
    """The executor that the options name, or the one that uses all ranks."""
    executor = hardware.executor
    if executor is not None:
        wanted = "an object with a method run(work), see pflcore.simulation.executor"
        is_object = isinstance(executor, Executor) and not isinstance(executor, type)
        require(is_object, "executor", wanted, executor)
        return executor
    return InProcess() if ranks.count == 1 else AcrossRanks(ranks)


# the memory -------------------------------------------------------------------


def peak_bytes(config: RunConfig, participation: float) -> int:
    """An estimate of a run's peak memory in bytes, besides its data.

    It is the sum of the state and of the larger of two: the rows of a round's cohort
    with the values that its clients keep of their batches, or the rows of all clients
    in an evaluation.
    """
    context = config.context
    net = context.net
    engine = context.engine
    n = context.data.n
    cohort = max(1, int(participation * n + 0.5))
    row = net.w0.nbytes
    client_bytes, server_bytes, shared_bytes = row_bytes(config)
    in_memory = 0 if config.folder else client_bytes + server_bytes
    state = shared_bytes + n * net.b0.nbytes + in_memory
    rows_in_training = VMAP_ROW_COPIES if engine.form == "vmap" else 2
    training = rows_in_training * row
    evaluation = (client_bytes + server_bytes) // n
    if not evaluation and config.algorithm.traits.evaluation_only:
        # An algorithm with options for the evaluation alone, whose clients keep no
        # rows, trains in the evaluation.
        evaluation = training
    trained = cohort * (training + STATE_COPIES * client_bytes // n)
    if config.ranks.count > 1:
        # The rows of the whole cohort, as they come from the ranks and in their order.
        trained += 2 * cohort * (row + client_bytes // n)
    in_threads = min(context.workers.count, cohort) if engine.name == "loop" else 0
    copies = (ROW_COPIES + 3 * in_threads) * row
    batches = batch_bytes(context, cohort)
    return state + batches + max(trained, n * evaluation) + copies


def concurrent_clients(context: TrainContext, cohort: int) -> int:
    """The number of clients that take a step at the same time."""
    threads = context.workers.count
    if context.engine.form == "module":
        return min(threads, cohort)
    if context.engine.form == "vmap":
        return min(threads * context.clients_per_block, cohort)
    if has_kernels(context.data.device):
        return threads
    return min(context.clients_per_block, cohort)


def adjustable_clients_per_block(context: TrainContext) -> int | None:
    """The run's `clients_per_block` where it has an effect, else None."""
    form = context.engine.form
    if form == "module":
        return None
    if form != "vmap" and has_kernels(context.data.device):
        return None
    return context.clients_per_block


def batch_bytes(context: TrainContext, cohort: int) -> int:
    """Bytes that clients keep of their minibatches while they take a step."""
    chain = context.engine.chain
    clients = concurrent_clients(context, cohort)
    batch_size = context.training.batch_size
    row = context.net.w0
    if chain is not None and has_kernels(context.data.device):
        return clients * chain.activation_bytes(batch_size, row.element_size())
    largest_batch = min(batch_size, int(context.data.size("train").max()))
    total = clients * largest_batch * context.sample_activation_bytes
    if context.graphs is not None and context.graphs.refusal_reason is None:
        # A captured step has memory of its own, besides that of the steps that are not
        # captured: activations, the clients' rows, and their gradients.
        total = 2 * (total + clients * row.nbytes)
    return total


def row_bytes(config: RunConfig) -> tuple[int, int, int]:
    """The bytes of a run's state, in three parts.

    These are the state of all clients, the server's rows for clients, and the part of
    the server's state that all clients share.
    """
    alg = config.algorithm
    net = config.context.net
    n = config.context.data.n
    server = alg.init(**alg.server_init_args(net), n=n)
    client_state = new_client_state(alg, net, server, n)
    optimizer = kept_optimizer_state(net, config.context.training)
    own = [*client_state.values(), *optimizer.values()]
    one_client = sum(tensor.nbytes for tensor in own)
    tables = [server[name] for name in alg.traits.per_client_state]
    per_client = sum(table.nbytes for table in tables if table.dim() > 1)
    total = sum(tensor.nbytes for tensor in server.values())
    return n * one_client, per_client, total - per_client


def storage_folder(
    config: RunConfig, choice: str | Path, participation: float
) -> Path | None:
    """The folder for client rows; None where they stay in memory.

    Raises RunTooLarge where the disk has less space than the rows may take. Raises
    ValueError where the folder does not exist.

    Args:
        config: The options of the run.
        choice: "memory", "auto" or a folder, see `Hardware`.
        participation: The fraction of clients that take part in a round.
    """
    context = config.context
    n = context.data.n
    client_bytes, server_bytes, _ = row_bytes(config)
    device = context.data.device.type
    if choice == "memory" or not client_bytes + server_bytes or device != "cpu":
        return None
    if choice == "auto":
        capacity = memory.capacity(device)
        peak = peak_bytes(config, participation)
        if capacity is None or peak <= capacity // 2:
            return None
    if choice == "auto":
        choice = tempfile.gettempdir()
    folder = Path(choice)
    require(folder.is_dir(), "storage", "'auto', 'memory' or a folder", str(choice))
    participants = min(n, int(participation * n + 1) * context.rounds)
    needed = client_bytes * participants // n + server_bytes
    check_disk_space("the clients' rows may take", needed, folder, memory.RunTooLarge)
    return folder
