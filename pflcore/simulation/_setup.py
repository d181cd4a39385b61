"""What a run begins from: everything checked and on its device, and the state before
round 1; and the memory that it needs at its peak, beside its data.
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
from pflcore.train._clients import TrainContext
from pflcore.train._engines import Engine
from pflcore.train._losses import default_loss, ignored_label
from pflcore.train._random import draw_without_replacement
from pflcore.train._select_engine import make_context
from pflcore.train._workers import Workers

# rows: the model as given, as started from, as bound in a thread, a kernel's own, what
# an allocator keeps of freed ones
ROW_COPIES = 20
VMAP_ROW_COPIES = (
    # rows of a client that trains in vmap: its model, gradients and their temporaries
    6
)
# times a client's own state: before the round, after it, and on its way
STATE_COPIES = 3


def training_data(run: Any) -> Federation:
    """The federation that a run (a `Simulation`) trains on: without the labels that its
    loss leaves out, poisoned by its adversary, and with a split "val" where its
    algorithm needs one."""
    loss = run.model.loss_fn if isinstance(run.model, Net) else run.loss
    data: Federation = mask_ignored_label(run.data, ignored_label(loss))
    adversary = run.robustness.adversary
    split = run.evaluation.split
    if adversary is not None:
        data = adversary.poison_data(data)
    if run.algorithm.traits.needs_val:
        data = with_validation(data, run.seed)
    words = f"one of {', '.join(data.index)}"
    if split in SPLITS:
        words += f" (hold samples out with split({split}=0.2))"
    never = run.evaluation.every == 0
    require(never or split in data.index, "evaluation.split", words, split, data.index)
    return data


def select_eval_clients(run: Any) -> Tensor | None:
    """The ids [S] of those who are evaluated, ascending; None: everybody. A number of
    clients are drawn of those with samples."""
    asked = run.evaluation.clients
    data = run.data
    adversary = run.robustness.adversary
    honest = (
        torch.arange(data.n) if adversary is None else adversary.honest_clients(data.n)
    )
    if asked is None:
        return None if adversary is None else honest
    if not isinstance(asked, int):
        return ids_of("evaluation.clients", asked, data.n).sort().values
    split = run.evaluation.split if run.evaluation.split in data.index else "train"
    have = honest[data.size(split)[honest] > 0]
    return (
        have[
            draw_without_replacement(
                len(have), min(asked, len(have)), run.seed, "eval_clients"
            )
        ]
        .sort()
        .values
    )


def prepare_run(run: Any, device: str) -> tuple[RunConfig, State]:
    """What stays the same over a run, on its device, and its first state. MemoryError
    in one sentence where they do not fit, ValueError where its model or its schedule
    does not."""
    model = run.model
    if not isinstance(model, Net):
        model = Net(model, run.loss or default_loss(run.data.y), seed=run.seed)
    elif run.loss is not None:
        raise ValueError(
            "loss: this Net has a loss of its own; give it to the Net, Net(model, "
            "loss), or give "
            "the bare model."
        )
    net = run.algorithm.prepare(model)
    batch_norm_policy(run.algorithm, net, run.batch_norm)
    run.training.lr_at(1, run.rounds)  # so that a schedule that fails does so now
    try:
        return _prepare_run(run, net, device)
    except Exception as error:
        if not memory.is_out_of_memory(error) or isinstance(error, memory.RunTooLarge):
            raise
        request = memory.failed_request(error)  # the error itself holds what it made
    memory.free_caches(device)
    plain = TrainContext(net, run.data, run.training, Engine("loop"), Workers(1))
    peak = peak_bytes(RunConfig(run.algorithm, plain), run.participation)
    data = human_bytes(run.data.x.nbytes + run.data.y.nbytes)
    where = f"before the first round, with {data} of data"
    raise MemoryError(memory.out_of_memory_text(where, peak, request, device))


def _prepare_run(run: Any, net: Net, device: str) -> tuple[RunConfig, State]:
    hardware = run.hardware
    alg = run.algorithm
    data = run.data
    if device != "cpu":
        net = net.to(device)
        data = data.to(device)
    where = (
        hardware.workers,
        run.seed,
        run.rounds,
        hardware.clients_per_block,
        hardware.graphs,
    )
    context = make_context(net, data, run.training, hardware.engine, *where)
    config = RunConfig(alg, context, run.robustness, run.batch_norm)
    config = config._replace(
        folder=storage_folder(config, hardware.storage, run.participation)
    )
    memory.check_fits_memory(
        peak_bytes(config, run.participation),
        device,
        adjustable_clients_per_block(context),
    )
    return config, initial_state(alg, context.net, data.n, config.folder)


# the memory -------------------------------------------------------------------


def peak_bytes(config: RunConfig, participation: float) -> int:
    """An estimate of a run's peak memory beside its data: the state, and beside it the
    rows of a round's cohort and what its clients keep of their batches, or the rows of
    all clients in an evaluation."""
    run = config.context
    alg = config.algorithm
    net = run.net
    engine = run.engine
    n = run.data.n
    cohort = max(1, int(participation * n + 0.5))
    row = net.w0.nbytes
    own, server, shared = row_bytes(config)
    state = shared + n * net.b0.nbytes + (0 if config.folder else own + server)
    training = (VMAP_ROW_COPIES if engine.form == "vmap" else 2) * row
    # who keeps no rows and has options for later trains at the evaluation
    evaluation = (own + server) // n or (training if alg.traits.evaluation_only else 0)
    at_once = min(run.workers.count, cohort) if engine.name == "loop" else 0
    beside = max(cohort * (training + STATE_COPIES * own // n), n * evaluation)
    return state + batch_bytes(run, cohort) + beside + (ROW_COPIES + 3 * at_once) * row


def concurrent_clients(context: TrainContext, cohort: int) -> int:
    """How many clients of a cohort take a step at the same time."""
    threads = context.workers.count
    if context.engine.form == "module":
        return min(threads, cohort)
    if context.engine.form == "vmap":
        return min(threads * context.clients_per_block, cohort)
    return (
        threads
        if has_kernels(context.data.device)
        else min(context.clients_per_block, cohort)
    )


def adjustable_clients_per_block(context: TrainContext) -> int | None:
    """How many clients are computed at once at most, where that can be set
    (`clients_per_block`)."""
    in_blocks = context.engine.form == "vmap" or not has_kernels(context.data.device)
    return (
        context.clients_per_block
        if in_blocks and context.engine.form != "module"
        else None
    )


def batch_bytes(context: TrainContext, cohort: int) -> int:
    """What the clients who take a step at the same time keep of their minibatches."""
    chain = context.engine.chain
    at_once = concurrent_clients(context, cohort)
    batch = min(context.training.batch_size, int(context.data.size("train").max()))
    if chain is not None and has_kernels(context.data.device):
        return at_once * chain.activation_bytes(
            context.training.batch_size, context.net.w0.element_size()
        )
    kept = at_once * batch * context.sample_activation_bytes
    if context.graphs is not None and context.graphs.refusal_reason is None:
        # A captured step has memory of its own, beside that of the steps that are not
        # captured: activations, the clients' rows, and their gradients.
        kept = 2 * (kept + at_once * context.net.w0.nbytes)
    return kept


def row_bytes(config: RunConfig) -> tuple[int, int, int]:
    """Bytes of all clients' own rows, of the server's rows for each, and of what
    else it holds."""
    alg = config.algorithm
    net = config.context.net
    n = config.context.data.n
    server = alg.init(**alg.server_init_args(net), n=n)
    own = sum(v.nbytes for v in new_client_state(alg, net, server, n).values())
    each = sum(
        server[k].nbytes for k in alg.traits.per_client_state if server[k].dim() > 1
    )
    return n * own, each, sum(v.nbytes for v in server.values()) - each


def storage_folder(
    config: RunConfig, choice: str | Path, participation: float
) -> Path | None:
    """The folder for the clients' rows, or None: they stay in memory. RunTooLarge, one
    sentence, where the disk has less than may be written."""
    run = config.context
    own, server, _ = row_bytes(config)
    device = run.data.device.type
    if choice == "memory" or not own + server or device != "cpu":
        return None
    most = memory.capacity(device)
    if choice == "auto" and (
        most is None or peak_bytes(config, participation) <= most // 2
    ):
        return None
    folder = Path(tempfile.gettempdir() if choice == "auto" else choice)
    require(folder.is_dir(), "storage", "'auto', 'memory' or a folder", str(choice))
    ever = min(run.data.n, int(participation * run.data.n + 1) * run.rounds)
    wanted = own * ever // run.data.n + server
    check_disk_space("the clients' rows may take", wanted, folder, memory.RunTooLarge)
    return folder
