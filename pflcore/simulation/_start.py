"""What a run begins from: everything checked and on its device, and the state before round 1; and
the memory that it needs at its peak, beside its data.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pflcore.check import ids_of, need
from pflcore.data._federation import Federation
from pflcore.data._roles import held_out, void_left_out
from pflcore.data._samples import SPLITS
from pflcore.metrics import human
from pflcore.ops._chain import has_kernels
from pflcore.simulation.round import (
    Setup,
    State,
    begin,
    check_room,
    fresh,
    policy,
)
from pflcore.train import Net
from pflcore.train import _memory as memory
from pflcore.train._choose import prepared
from pflcore.train._clients import Setting
from pflcore.train._engines import Engine
from pflcore.train._losses import default_loss, ignored_label
from pflcore.train._random import drawn
from pflcore.train._workers import Workers

# rows: the model as given, as started from, as bound in a thread, a kernel's own, what an allocator
# keeps of freed ones
COPIES = 20
IN_VMAP = 6  # rows of a client that trains in vmap: its model, gradients and their temporaries
OWN = 3  # times a client's own state: before the round, after it, and on its way


def data_of(run: Any) -> Federation:
    """The federation that a run (a `Simulation`) trains on: without the labels that its loss leaves
    out, poisoned by its adversary, and with a split "val" where its algorithm needs one."""
    loss = run.model.criterion if isinstance(run.model, Net) else run.loss
    data: Federation = void_left_out(run.data, ignored_label(loss))
    adversary, split = run.robustness.adversary, run.evaluation.split
    if adversary is not None:
        data = adversary.poisoned(data)
    if run.algorithm.traits.needs_val:
        data = held_out(data, run.seed)
    words = f"one of {', '.join(data.index)}"
    if split in SPLITS:
        words += f" (hold samples out with split({split}=0.2))"
    never = run.evaluation.every == 0
    need(never or split in data.index, "evaluation.split", words, split, data.index)
    return data


def looked_at(run: Any) -> Tensor | None:
    """The ids [S] of those who are evaluated, ascending; None: everybody. A number of clients are
    drawn of those with samples."""
    asked, data, adversary = run.evaluation.clients, run.data, run.robustness.adversary
    honest = torch.arange(data.n) if adversary is None else adversary.honest(data.n)
    if asked is None:
        return None if adversary is None else honest
    if not isinstance(asked, int):
        return ids_of("evaluation.clients", asked, data.n).sort().values
    split = run.evaluation.split if run.evaluation.split in data.index else "train"
    have = honest[data.size(split)[honest] > 0]
    return have[drawn(len(have), min(asked, len(have)), run.seed, "eval_clients")].sort().values


def placed(run: Any, device: str) -> tuple[Setup, State]:
    """What stays the same over a run, on its device, and its first state.
    MemoryError in one sentence where they do not fit, ValueError where its model or its schedule
    does not."""
    model = run.model
    if not isinstance(model, Net):
        model = Net(model, run.loss or default_loss(run.data.y), seed=run.seed)
    elif run.loss is not None:
        raise ValueError(
            "loss: this Net has a loss of its own; give it to the Net, Net(model, loss), or give "
            "the bare model."
        )
    net = run.algorithm.prepare(model)
    policy(run.algorithm, net, run.batch_norm)
    run.training.lr_at(1, run.rounds)  # so that a schedule that fails does so now
    try:
        return _placed(run, net, device)
    except Exception as error:
        if not memory.ran_out(error) or isinstance(error, memory.RunTooLarge):
            raise
        request = memory.request_of(error)  # the error itself holds what it made
    memory.give_back(device)
    plain = Setting(net, run.data, run.training, Engine("loop"), Workers(1))
    peak = peak_bytes(Setup(run.algorithm, plain), run.participation)
    data = human(run.data.x.nbytes + run.data.y.nbytes)
    where = f"before the first round, with {data} of data"
    raise MemoryError(memory.sentence(where, peak, request, device))


def _placed(run: Any, net: Net, device: str) -> tuple[Setup, State]:
    hardware, alg, data = run.hardware, run.algorithm, run.data
    if device != "cpu":
        net, data = net.to(device), data.to(device)
    where = (hardware.workers, run.seed, run.rounds, hardware.together, hardware.graphs)
    setting = prepared(net, data, run.training, hardware.engine, *where)
    setup = Setup(alg, setting, run.robustness, run.batch_norm)
    setup = setup._replace(folder=folder_for(setup, hardware.rows, run.participation))
    memory.refuse(peak_bytes(setup, run.participation), device, block_size(setting))
    return setup, begin(alg, setting.net, data.n, setup.folder)


# the memory -------------------------------------------------------------------------------------


def peak_bytes(setup: Setup, participation: float) -> int:
    """An estimate of a run's peak memory beside its data: the state, and beside it the rows of a
    round's cohort and what its clients keep of their batches, or the rows of all clients in an
    evaluation."""
    run, alg = setup.setting, setup.algorithm
    net, engine, n = run.net, run.engine, run.data.n
    cohort = max(1, int(participation * n + 0.5))
    row = net.w0.nbytes
    own, server, shared = row_bytes(setup)
    state = shared + n * net.b0.nbytes + (0 if setup.folder else own + server)
    training = (IN_VMAP if engine.form == "vmap" else 2) * row
    # who keeps no rows and has options for later trains at the evaluation
    evaluation = (own + server) // n or (training if alg.traits.late else 0)
    at_once = min(run.workers.count, cohort) if engine.name == "loop" else 0
    beside = max(cohort * (training + OWN * own // n), n * evaluation)
    return state + bytes_of_batches(run, cohort) + beside + (COPIES + 3 * at_once) * row


def clients_at_once(run: Setting, cohort: int) -> int:
    """How many clients of a cohort take a step at the same time."""
    threads = run.workers.count
    if run.engine.form == "module":
        return min(threads, cohort)
    if run.engine.form == "vmap":
        return min(threads * run.together, cohort)
    return threads if has_kernels(run.data.device) else min(run.together, cohort)


def block_size(run: Setting) -> int | None:
    """How many clients are computed at once at most, where that can be set (`together`)."""
    in_blocks = run.engine.form == "vmap" or not has_kernels(run.data.device)
    return run.together if in_blocks and run.engine.form != "module" else None


def bytes_of_batches(run: Setting, cohort: int) -> int:
    """What the clients who take a step at the same time keep of their minibatches."""
    chain, at_once = run.engine.chain, clients_at_once(run, cohort)
    batch = min(run.training.batch_size, int(run.data.size("train").max()))
    if chain is not None and has_kernels(run.data.device):
        return at_once * chain.bytes_kept(run.training.batch_size, run.net.w0.element_size())
    kept = at_once * batch * run.activations
    if run.graphs is not None and run.graphs.refusal is None:
        # A captured step has memory of its own, beside that of the steps that are not captured:
        # activations, the clients' rows, and their gradients.
        kept = 2 * (kept + at_once * run.net.w0.nbytes)
    return kept


def row_bytes(setup: Setup) -> tuple[int, int, int]:
    """Bytes of all clients' own rows, of the server's rows for each, and of what else it holds."""
    alg, net, n = setup.algorithm, setup.setting.net, setup.setting.data.n
    server = alg.init(**alg.initial(net), n=n)
    own = sum(v.nbytes for v in fresh(alg, net, server, n).values())
    each = sum(server[k].nbytes for k in alg.traits.per_client if server[k].dim() > 1)
    return n * own, each, sum(v.nbytes for v in server.values()) - each


def folder_for(setup: Setup, choice: str | Path, participation: float) -> Path | None:
    """The folder for the clients' rows, or None: they stay in memory. RunTooLarge, one sentence,
    where the disk has less than may be written."""
    run, (own, server, _) = setup.setting, row_bytes(setup)
    device = run.data.device.type
    if choice == "memory" or not own + server or device != "cpu":
        return None
    most = memory.capacity(device)
    if choice == "auto" and (most is None or peak_bytes(setup, participation) <= most // 2):
        return None
    folder = Path(tempfile.gettempdir() if choice == "auto" else choice)
    need(folder.is_dir(), "rows", "'auto', 'memory' or a folder", str(choice))
    ever = min(run.data.n, int(participation * run.data.n + 1) * run.rounds)
    wanted = own * ever // run.data.n + server
    check_room("the clients' rows may take", wanted, folder, memory.RunTooLarge)
    return folder
