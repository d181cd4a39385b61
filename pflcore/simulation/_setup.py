"""The beginning of a run: its options on their device, and its first state.

It also estimates the memory that a run needs at its peak, beside its data.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pflcore.check import ids_of, require
from pflcore.data._federation import Federation
from pflcore.data._protocols import mask_ignored_label, with_validation
from pflcore.data._samples import SPLITS
from pflcore.metrics import human_bytes
from pflcore.ops._chain import has_kernels
from pflcore.simulation.round import (
    RunConfig,
    State,
    batch_norm_policy,
    check_disk_space,
    initial_state,
    new_client_state,
)
from pflcore.train import Net
from pflcore.train import _memory as memory
from pflcore.train._context import TrainContext
from pflcore.train._engines import Engine
from pflcore.train._losses import default_loss, ignored_label
from pflcore.train._random import draw_without_replacement
from pflcore.train._select_engine import make_context
from pflcore.train._workers import Workers

# Rows of the size of a model that a run holds beside the state: the model as it was
# given, as it starts, and as each thread binds it, those of a kernel, and those that an
# allocator keeps after they are freed.
ROW_COPIES = 20
# Rows of a client that trains in vmap: its model, gradients and their temporaries.
VMAP_ROW_COPIES = 6
# Copies of a client's state: before the round, after it, and on the way to the server.
STATE_COPIES = 3


def training_data(run: Any) -> Federation:
    """The federation that a run (a `Simulation`) trains on.

    It lacks the samples that the loss ignores, is poisoned by the adversary, and has a
    split "val" where the algorithm needs one.
    """
    loss = run.model.loss_fn if isinstance(run.model, Net) else run.loss
    data: Federation = mask_ignored_label(run.data, ignored_label(loss))
    adversary = run.robustness.adversary
    if adversary is not None:
        data = adversary.poison_data(data)
    if run.algorithm.traits.needs_val:
        data = with_validation(data, run.seed)
    split = run.evaluation.split
    wanted = f"one of {', '.join(data.index)}"
    if split in SPLITS:
        wanted += f" (hold samples out with split({split}=0.2))"
    is_evaluated = run.evaluation.every != 0
    fits = split in data.index or not is_evaluated
    require(fits, "evaluation.split", wanted, split, data.index)
    return data


def select_eval_clients(run: Any) -> Tensor | None:
    """The ids [S] of the clients that are evaluated, ascending; None: all.

    Where the options have a number, so many of the honest clients with samples are
    drawn.
    """
    choice = run.evaluation.clients
    data = run.data
    adversary = run.robustness.adversary
    if adversary is None:
        honest = torch.arange(data.n)
    else:
        honest = adversary.honest_clients(data.n)
    if choice is None:
        return None if adversary is None else honest
    if not isinstance(choice, int):
        return ids_of("evaluation.clients", choice, data.n).sort().values
    split = run.evaluation.split if run.evaluation.split in data.index else "train"
    candidates = honest[data.size(split)[honest] > 0]
    count = min(choice, len(candidates))
    drawn = draw_without_replacement(len(candidates), count, run.seed, "eval_clients")
    return candidates[drawn].sort().values


def prepare_run(run: Any, device: str) -> tuple[RunConfig, State]:
    """The constants of a run, on its device, and its first state.

    Raises MemoryError where they do not fit into memory, ValueError where the model or
    the schedule of learning rates does not fit the run.
    """
    model = run.model
    if not isinstance(model, Net):
        model = Net(model, run.loss or default_loss(run.data.y), seed=run.seed)
    elif run.loss is not None:
        raise ValueError(
            "loss: this Net has a loss of its own; give it to the Net, Net(model, "
            "loss), or give the bare model."
        )
    net = run.algorithm.prepare(model)
    batch_norm_policy(run.algorithm, net, run.batch_norm)
    run.training.lr_at(1, run.rounds)  # a schedule that fails fails now
    try:
        return _prepare_run(run, net, device)
    except Exception as error:
        if not memory.is_out_of_memory(error) or isinstance(error, memory.RunTooLarge):
            raise
        request = memory.failed_request(error)
    # Only here, after the `except`: the error holds the tensors of its frames.
    memory.free_caches(device)
    context = TrainContext(net, run.data, run.training, Engine("loop"), Workers(1))
    peak = peak_bytes(RunConfig(run.algorithm, context), run.participation)
    data_bytes = run.data.x.nbytes + run.data.y.nbytes
    where = f"before the first round, with {human_bytes(data_bytes)} of data"
    raise MemoryError(memory.out_of_memory_text(where, peak, request, device))


def _prepare_run(run: Any, net: Net, device: str) -> tuple[RunConfig, State]:
    """The result of `prepare_run`; a lack of memory raises errors of any kind."""
    hardware = run.hardware
    alg = run.algorithm
    data = run.data
    if device != "cpu":
        net = net.to(device)
        data = data.to(device)
    context = make_context(
        net,
        data,
        run.training,
        hardware.engine,
        hardware.workers,
        run.seed,
        run.rounds,
        hardware.clients_per_block,
        hardware.graphs,
    )
    config = RunConfig(alg, context, run.robustness, run.batch_norm)
    folder = storage_folder(config, hardware.storage, run.participation)
    config = config._replace(folder=folder)
    peak = peak_bytes(config, run.participation)
    memory.check_fits_memory(peak, device, adjustable_clients_per_block(context))
    return config, initial_state(alg, context.net, data.n, folder)


# the memory -------------------------------------------------------------------


def peak_bytes(config: RunConfig, participation: float) -> int:
    """An estimate of a run's peak memory beside its data.

    It is the state, and beside it the larger of two: the rows of a round's cohort with
    what its clients keep of their batches, or the rows of all clients in an evaluation.
    """
    context = config.context
    net = context.net
    engine = context.engine
    n = context.data.n
    cohort = max(1, int(participation * n + 0.5))
    row = net.w0.nbytes
    client_bytes, server_bytes, shared_bytes = row_bytes(config)
    stored = 0 if config.folder else client_bytes + server_bytes
    state = shared_bytes + n * net.b0.nbytes + stored
    training = (VMAP_ROW_COPIES if engine.form == "vmap" else 2) * row
    evaluation = (client_bytes + server_bytes) // n
    if not evaluation and config.algorithm.traits.evaluation_only:
        # Such an algorithm trains at the evaluation: it has options for it, and clients
        # keep no rows.
        evaluation = training
    trained = cohort * (training + STATE_COPIES * client_bytes // n)
    in_threads = min(context.workers.count, cohort) if engine.name == "loop" else 0
    copies = (ROW_COPIES + 3 * in_threads) * row
    batches = batch_bytes(context, cohort)
    return state + batches + max(trained, n * evaluation) + copies


def concurrent_clients(context: TrainContext, cohort: int) -> int:
    """The number of clients of a cohort that take a step at the same time."""
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
        # A captured step has memory of its own, beside that of the steps that are not
        # captured: activations, the clients' rows, and their gradients.
        total = 2 * (total + clients * row.nbytes)
    return total


def row_bytes(config: RunConfig) -> tuple[int, int, int]:
    """Bytes of all clients' state, of the server's rows for clients, and of the rest.

    The rest is what the server holds for all clients together.
    """
    alg = config.algorithm
    net = config.context.net
    n = config.context.data.n
    server = alg.init(**alg.server_init_args(net), n=n)
    client_state = new_client_state(alg, net, server, n)
    one_client = sum(tensor.nbytes for tensor in client_state.values())
    tables = [server[name] for name in alg.traits.per_client_state]
    per_client = sum(table.nbytes for table in tables if table.dim() > 1)
    total = sum(tensor.nbytes for tensor in server.values())
    return n * one_client, per_client, total - per_client


def storage_folder(
    config: RunConfig, choice: str | Path, participation: float
) -> Path | None:
    """The folder for client rows; None: they stay in memory.

    Raises RunTooLarge where the disk has less space than may be written.
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
    folder = Path(tempfile.gettempdir() if choice == "auto" else choice)
    require(folder.is_dir(), "storage", "'auto', 'memory' or a folder", str(choice))
    participants = min(n, int(participation * n + 1) * context.rounds)
    needed = client_bytes * participants // n + server_bytes
    check_disk_space("the clients' rows may take", needed, folder, memory.RunTooLarge)
    return folder
