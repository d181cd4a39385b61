"""The beginning of a run: its options are checked and brought to their device.

Symbols: N clients of the federation; S of them are evaluated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, TypeVar

import torch
from torch import Tensor, nn

from pflcore.algorithms._protocol import Algorithm
from pflcore.check import (
    EXPECT_MODEL,
    client_id,
    device_of,
    ids_of,
    require,
    warn_caller,
)
from pflcore.data._federation import Federation
from pflcore.data._protocols import leave_out_unlabelled, with_validation
from pflcore.data._read import SPLITS
from pflcore.robust import Mean, mean_in
from pflcore.simulation._attacks import Adversary
from pflcore.simulation._ranks import ONE_RANK, find_ranks, local_device
from pflcore.simulation._sampling import sampling_kind
from pflcore.simulation._settings import Evaluation, Hardware, Robustness
from pflcore.simulation._state import RunConfig
from pflcore.train import Net, Training
from pflcore.train._losses import Loss, default_loss, ignored_label
from pflcore.train._random import draw_without_replacement
from pflcore.train._select_engine import make_context

# A model: with its loss, alone, or as a function that makes it.
ModelSource = Annotated[Net | nn.Module | Callable[[], nn.Module], EXPECT_MODEL]
# Options of algorithms that are a client, by its id or its name.
CLIENT_OPTIONS = ("target", "trusted_client")
O = TypeVar("O", bound=Algorithm | Mean)


def with_client_ids(options: O, data: Federation) -> O:
    """An algorithm or a mean with the ids of clients that its options name.

    Raises ValueError where an option names no client of the federation.
    """
    changes: dict[str, Any] = {}
    for option in CLIENT_OPTIONS:
        client = getattr(options, option, None)
        if isinstance(client, str):
            changes[option] = client_id(option, client, data.n, data.names)
    mean = mean_in(options)
    if mean is not None:
        changes["mean"] = with_client_ids(mean, data)
    return replace(options, **changes) if changes else options


def with_adversary_ids(
    robustness: Robustness, algorithm: Algorithm, data: Federation
) -> Robustness:
    """The options with the ids of the clients that the adversary names.

    Raises ValueError where it names no client of the federation, or attacks what the
    algorithm does not have.
    """
    if robustness.adversary is None:
        return robustness
    adversary = robustness.adversary.with_ids(data)
    adversary.check_target(getattr(algorithm, "target", None))
    return replace(robustness, adversary=adversary)


def training_data(
    data: Federation,
    algorithm: Algorithm,
    net: Net,
    robustness: Robustness,
    evaluation: Evaluation,
    seed: int,
) -> Federation:
    """The federation that a run trains on.

    It lacks the samples that the loss ignores, and the adversary has poisoned it. It
    has a split "val" where the algorithm needs one. Raises ValueError where it lacks
    the split of the evaluation.
    """
    data = leave_out_unlabelled(data, ignored_label(net.loss_fn))
    if robustness.adversary is not None:
        data = robustness.adversary.poison_data(data)
    if algorithm.traits.needs_val:
        data = with_validation(data, seed)
    split = evaluation.split
    traits = algorithm.traits
    if split == "val" and (traits.needs_val or traits.chooses_on_val):
        warn_caller(
            f"evaluation: {type(algorithm).__name__} learns from the split 'val' "
            "itself, so its values there are better than on new samples; compare it "
            "with other methods on 'test'."
        )
    wanted = f"one of {', '.join(data.index)}"
    if split in SPLITS:
        wanted += f" (hold samples out with split({split}=0.2))"
    fits = split in data.index or evaluation.every == 0
    require(fits, "evaluation.split", wanted, split, data.index)
    return data


def select_eligible_clients(data: Federation, clients: Tensor | None) -> Tensor:
    """The ids of the clients that may take part, ascending.

    They have training samples. Raises ValueError where none of `clients` has.

    Args:
        data: The federation.
        clients: The ids, ascending, among which they are; None for all clients.
    """
    if clients is None:
        return data.trainable_clients
    eligible = clients[data.size("train")[clients] > 0]
    names = data.names_of(clients.tolist())
    wanted = "a client with training samples"
    require(len(eligible), "clients", wanted, names)
    return eligible


def select_eval_clients(
    data: Federation, evaluation: Evaluation, adversary: Adversary | None, seed: int
) -> Tensor:
    """The ids [S], ascending, of the evaluated clients.

    Where the options have a number instead of ids, that many clients are drawn among
    the honest ones with samples. Raises ValueError where none of the clients has
    samples of a split that is evaluated.
    """
    ids = _chosen_eval_clients(data, evaluation, adversary, seed)
    splits = [evaluation.split, *(["train"] if evaluation.train_loss else [])]
    for split in splits if evaluation.every else []:
        has_samples = split not in data.index or bool(data.size(split)[ids].any())
        expected = f"clients of which one has samples of the split {split!r}"
        require(has_samples, "evaluation.clients", expected, ids.tolist())
    return ids


def _chosen_eval_clients(
    data: Federation, evaluation: Evaluation, adversary: Adversary | None, seed: int
) -> Tensor:
    """The ids [S], ascending, of the clients that the options choose."""
    choice = evaluation.clients
    if adversary is None:
        honest = torch.arange(data.n)
    else:
        honest = adversary.honest_clients(data.n)
    if choice is None:
        return honest
    if not isinstance(choice, int):
        ids = ids_of("evaluation.clients", choice, data.n, data.names)
        return ids.sort().values
    split = evaluation.split
    if split not in data.index:
        split = "train"
    candidates = honest[data.size(split)[honest] > 0]
    count = min(choice, len(candidates))
    drawn = draw_without_replacement(len(candidates), count, seed, "eval_clients")
    return candidates[drawn].sort().values


def check_sampling(
    sampling: Any,
    participation: float,
    algorithm: Algorithm,
    eligible_clients: Tensor,
) -> None:
    """Raises ValueError where the mean of the updates knows no such sampling.

    Warns where many rounds will have no client.
    """
    kind = sampling_kind(sampling)
    num_eligible = len(eligible_clients)
    mean = mean_in(algorithm)
    if mean is not None:
        mean.check_rounds(kind, participation, num_eligible)
    expected = participation * num_eligible
    if kind == "poisson" and expected < 1:
        warn_caller(
            f"sampling: with participation={participation:g}, {expected:g} "
            "clients take part in a round on average; many rounds have none."
        )


def as_net(model: ModelSource, loss: Loss | None, data: Federation, seed: int) -> Net:
    """The model with its loss. Raises ValueError where two losses are given."""
    if not isinstance(model, Net):
        return Net(model, loss or default_loss(data.y), seed=seed)
    if loss is not None:
        raise ValueError(
            "loss: this Net has a loss of its own; give it to the Net, Net(model, "
            "loss), or give the bare model."
        )
    return model


def make_config(
    net: Net,
    data: Federation,
    hardware: Hardware,
    training: Training,
    rounds: int,
    seed: int,
    **options: Any,
) -> RunConfig:
    """The options that the rounds of a run need, on the run's device.

    Raises ValueError where the model or the schedule of learning rates does not fit.

    Args:
        net: The model with its loss.
        data: The federation.
        hardware: The place of the run.
        training: The options of local training.
        rounds: The number of rounds.
        seed: The seed of the run.
        options: The other attributes of a `RunConfig`, by name.
    """
    device = device_of(hardware.device)
    ranks = ONE_RANK
    if hardware.ranks == "auto":
        device = local_device(device)
        ranks = find_ranks(hardware.rank_timeout)
    if device != "cpu":
        net = net.to(device)
        data = data.to(device)
    context = make_context(
        net,
        data,
        training,
        hardware.engine,
        hardware.workers,
        seed,
        rounds,
        hardware.clients_per_block,
        hardware.graphs,
    )
    return RunConfig.of(context=context, ranks=ranks, **options)
