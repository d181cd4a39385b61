"""What a run begins from: everything checked and on its device, and the state before round 1."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from pflcore.check import ids_of
from pflcore.data.federation import Federation
from pflcore.data.roles import held_out
from pflcore.metrics import human
from pflcore.simulation.footprint import folder_for, peak_bytes
from pflcore.simulation.round import Setup, State, begin, check_start, copied, policy
from pflcore.train import Engine, Net, Setting, memory, prepared
from pflcore.train.losses import default_loss
from pflcore.train.random import drawn
from pflcore.train.workers import Workers


def data_of(run: Any) -> Federation:
    """The federation that a run (a `Simulation`) trains on: poisoned by its adversary, and with a
    split "val" where its algorithm needs one."""
    data: Federation = run.data
    adversary, split = run.robustness.adversary, run.evaluation.split
    if adversary is not None:
        data = adversary.poisoned(data)
    if run.algorithm.traits.needs_val:
        data = held_out(data, run.seed)
    if split not in data.index:
        raise ValueError(
            f"evaluation.split: the federation has {', '.join(data.index)}, not {split!r}; make it "
            "with split(test=0.2)."
        )
    return data


def looked_at(run: Any) -> Tensor | None:
    """The ids [S] of those who are evaluated, ascending; None: everybody. A number of clients are
    drawn of those with samples."""
    asked, data, adversary = run.evaluation.clients, run.data, run.robustness.adversary
    n = data.n
    honest = torch.arange(n) if adversary is None else adversary.honest(n)
    if asked is None:
        return None if adversary is None else honest
    if not isinstance(asked, int):
        return ids_of("evaluation.clients", asked, n)
    have = honest[data.size(run.evaluation.split)[honest] > 0]
    return have[drawn(len(have), min(asked, len(have)), run.seed, "eval_clients")].sort().values


def placed(run: Any, device: str) -> tuple[Setup, State]:
    """What stays the same over a run, on its device, and its first state.
    MemoryError in one sentence where they do not fit, ValueError where its model, its schedule or
    its warm start do not."""
    net = _net(run)
    run.training.lr_at(1, run.rounds)  # so that a schedule that fails does so now
    try:
        setup, state = _placed(run, net, device)
    except (MemoryError, RuntimeError) as error:
        if not memory.ran_out(error) or isinstance(error, memory.RunTooLarge):
            raise
        request = memory.request_of(error)  # the error itself holds what it made
    else:
        if state.round >= run.rounds:
            raise ValueError(
                f"rounds: expected more than the {state.round} that the warm start has played, got "
                f"{run.rounds}."
            )
        return setup, state
    memory.give_back(device)
    data = human(run.data.x.nbytes + run.data.y.nbytes)
    plain = Setting(net, run.data, run.training, Engine("loop"), Workers(1))
    peak = peak_bytes(Setup(run.algorithm, plain), run.participation)
    where = f"before the first round, with {data} of data"
    raise MemoryError(memory.sentence(where, peak, request, device))


def _net(run: Any) -> Net:
    model = run.model
    if isinstance(model, Net) and run.loss is not None:
        raise ValueError(
            "loss: this Net has a loss of its own; give it to the Net, Net(model, loss), or give "
            "the bare model."
        )
    if not isinstance(model, Net):
        model = Net(model, run.loss or default_loss(run.data.y), seed=run.seed)
    net: Net = run.algorithm.prepare(model)
    policy(run.algorithm, net, run.batch_norm)
    return net


def _placed(run: Any, net: Net, device: str) -> tuple[Setup, State]:
    hardware, alg, data, start = run.hardware, run.algorithm, run.data, run.warm_start
    if device != "cpu":
        net, data = net.to(device), data.to(device)
    setting = prepared(
        net, data, run.training, hardware.engine, hardware.workers, run.seed, run.rounds
    )
    setup = Setup(alg, setting, run.robustness, run.batch_norm)
    folder = folder_for(setup, hardware.rows, run.participation, start is None)
    setup = setup._replace(folder=folder)
    memory.refuse(peak_bytes(setup, run.participation), device)
    if start is None:
        return setup, begin(alg, setting.net, data.n, folder)
    check_start(start, alg, setting.net, data.n)
    return setup, copied(setup, start)


def warn_of_strangers(run: Any, state: State) -> None:
    """Says that some who are evaluated never take part, where a client has a state."""
    if run.among is None or not state.clients:
        return
    who = torch.arange(run.data.n) if run.looked_at is None else run.looked_at
    left_out = int((~torch.isin(who, run.among)).sum())
    if left_out:
        warnings.warn(
            f"{run.name} keeps a state for each client, and {left_out} of those who are evaluated "
            "never take part: they get what a newcomer is; in such a setting take a method without "
            "client state.",
            stacklevel=4,
        )
