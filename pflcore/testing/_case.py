"""The case of an algorithm: a model, data, and plays.

A play is some rounds of the algorithm on four small clients in float64. In the recorded
play all clients take part in the first round, two in the second and all in the third.

Symbols: N clients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pflcore.algorithms._protocol import Algorithm, Tensors
from pflcore.check import checked
from pflcore.data._federation import Federation
from pflcore.data._protocols import with_validation
from pflcore.simulation._evaluate import evaluate
from pflcore.simulation._state import RunConfig, State, flatten_state, initial_state
from pflcore.simulation._uploads import RoundOutcome
from pflcore.simulation.round import step
from pflcore.testing._faults import (
    copies_of,
    describe_clients,
    errors_as_faults,
    non_finite_keys,
)
from pflcore.testing._watch import watched_copy
from pflcore.train import Net, Training
from pflcore.train._context import TrainContext
from pflcore.train._engines import Engine
from pflcore.train._losses import default_loss
from pflcore.train._workers import Workers

ALL = (0, 1, 2, 3)
PART = (1, 2)
# The cohorts of the recorded play. Clients that the algorithm requires are added.
COHORTS = (ALL, PART, ALL)
TRAINING = Training(lr=0.1, batch_size=8)


class Play(NamedTuple):
    """The results of a play.

    Attributes:
        last: The state after the last round.
        states: The tensors of the state before the first round, and after each round.
        done: The outcome of each round.
        uploads: The uploads [S, ...] of each call of `train`.
        unfit: The tensors of a state that were not finite: the name and the round.
    """

    last: State
    states: list[Tensors]
    done: list[RoundOutcome]
    uploads: list[Tensors]
    unfit: list[tuple[str, int]]


@checked
@dataclass(frozen=True)
class Case:
    """An algorithm with a model and data, and its recorded play.

    Args:
        given: The algorithm. Plays use a copy of it, see `watched`.
        model: A function that makes the model; by default a small MLP.
        federation: The data, of at least four clients; by default samples of three
            Gaussian classes.
        dtype: The dtype of the model and the data.
    """

    given: Algorithm
    model: Callable[[], nn.Module] | None = None
    federation: Federation | None = None
    dtype: torch.dtype = torch.float64

    @cached_property
    def data(self) -> Federation:
        """The first four clients of the federation, in the case's dtype.

        An algorithm that needs the split "val" has it.
        """
        data = self.federation or _gaussians()
        data = data.subset(ALL)
        if self.given.traits.needs_val:
            data = with_validation(data)
        return replace(data, x=self._converted(data.x), y=self._converted(data.y))

    def _converted(self, values: Tensor) -> Tensor:
        """The values in the case's dtype; whole numbers stay unchanged."""
        return values.to(self.dtype) if values.is_floating_point() else values

    @cached_property
    def net(self) -> Net:
        """The model of the plays, in the case's dtype."""
        make_model = self.model or _mlp
        loss = default_loss(self.data.y)
        net = Net(lambda: make_model().to(self.dtype), loss, seed=1)
        return self.given.prepare(net)

    @cached_property
    def watched(self) -> Algorithm:
        """A copy of the algorithm, whose hooks check their arguments and results."""
        return watched_copy(self.given)

    def config(self, algorithm: Algorithm | None = None, **changed: Any) -> RunConfig:
        """The configuration of a play.

        Args:
            algorithm: The algorithm; by default the watched one.
            changed: Other values for fields of the `TrainContext`.
        """
        context = TrainContext(
            self.net, self.data, TRAINING, Engine("loop"), Workers(1), rounds=6
        )
        return RunConfig.of(algorithm or self.watched, replace(context, **changed))

    def renumbered(
        self, numbers: Sequence[int], target: int = 1, **changed: Any
    ) -> RunConfig:
        """A configuration in which client `numbers[i]` has the number i.

        Clients that are not in `numbers` are left out.

        Args:
            target: The old number of the algorithm's target, if it has one.
            changed: Other values for fields of the `TrainContext`.
        """
        alg: Any = self.given
        if hasattr(alg, "target"):
            alg = replace(alg, target=numbers.index(target))
        return self.config(watched_copy(alg), data=self.data.subset(numbers), **changed)

    def breaking(self, clients: Sequence[int]) -> RunConfig:
        """A configuration in which the training of these clients overflows."""
        rows = []
        for split, index in self.data.index.items():
            if split != "test":
                rows += [index[client] for client in clients]
        x = self.data.x.clone()
        # The largest feature becomes 5e307, near the largest float64.
        x[torch.cat(rows)] *= 5e307 / x.abs().max()
        return self.config(data=replace(self.data, x=x))

    def otherwise_tested(self) -> RunConfig:
        """A configuration in which each client has test samples of another client.

        Each client also has one test sample less than that other client.
        """
        index = dict(self.data.index)
        if "test" in index:
            shorter = [rows[1:] for rows in index["test"]]
            index["test"] = [*shorter[1:], shorter[0]]
        return self.config(data=replace(self.data, index=index))

    def play(
        self, config: RunConfig, cohorts: Sequence[Sequence[int]] = COHORTS
    ) -> Play:
        """Plays a round with each cohort; raises Fault where a round fails."""
        alg = config.algorithm
        n = config.data.n
        state = initial_state(alg, config.net, n)
        play = Play(state, [tensors_of(state)], [], [], [])
        # The watched hook `train` appends to this list. An algorithm is frozen, so the
        # attribute cannot be assigned in the usual way.
        object.__setattr__(alg, "_uploads", play.uploads)
        for cohort in cohorts:
            ids = torch.tensor(sorted({*cohort, *alg.traits.required_clients}))
            place = f" in round {state.round + 1}{describe_clients(len(ids), n)}"
            with errors_as_faults("round", place):
                state, outcome = step(config, state, ids)
            play.states.append(tensors_of(state))
            play.done.append(outcome)
            unfit = [f"server.{key}" for key in outcome.non_finite_state]
            unfit += non_finite_keys(play.states[-1])
            play.unfit.extend((key, state.round) for key in unfit)
        return play._replace(last=state)

    @cached_property
    def recorded(self) -> Play:
        """The play of `COHORTS` that the checks compare with other plays."""
        return self.play(self.config())

    @cached_property
    def found(self) -> Tensors:
        """The results of the recorded play, see `results`."""
        return self.results(self.recorded)

    def evaluate(self, state: State, config: RunConfig) -> Tensors:
        """The results [N] of an evaluation, by name.

        Raises Fault where it fails.
        """
        split = "test" if "test" in config.data.index else "train"
        with errors_as_faults("predict"):
            values = evaluate(config, state, split)
        return {f"the evaluation's {key}": value for key, value in values.items()}

    def results(self, play: Play) -> Tensors:
        """A play's last state, its evaluation and its last report.

        The evaluation uses the data of the recorded play, also for plays with other
        data.
        """
        results = tensors_of(play.last) | self.evaluate(play.last, self.config())
        outcome = play.done[-1]
        if outcome.void or outcome.cohort is None:
            return results
        server = play.last.server
        return results | self.watched.report(server, outcome.mix, outcome.cohort)

    def left(self, config: RunConfig) -> Tensors:
        """The results of a play with this configuration."""
        return self.results(self.play(config))


def tensors_of(state: State) -> Tensors:
    """Copies of the tensors of a state, by name."""
    return copies_of(flatten_state(state))


def _mlp() -> nn.Module:
    """The default model, from six features to three classes."""
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def _gaussians() -> Federation:
    """Four clients with float64 samples of three Gaussian classes.

    The labels of every second client are shifted by one, so that clients differ.
    """
    generator = torch.Generator().manual_seed(4)
    centres = 2 * torch.randn(3, 6, generator=generator, dtype=torch.float64)

    def samples(count: int, shift: int) -> tuple[Tensor, Tensor]:
        classes = torch.randint(0, 3, (count,), generator=generator)
        noise = torch.randn(count, 6, generator=generator, dtype=torch.float64)
        return centres[classes] + noise, (classes + shift) % 3

    clients = []
    # Two clients have equally many samples, because the engine "vmap" trains such
    # clients in the same steps.
    for client, count in enumerate((10, 20, 31, 20)):
        splits = {}
        for split in ("train", "val", "test"):
            splits[split] = samples(count, shift=client % 2)
        clients.append(splits)
    return Federation.from_clients(clients, classes=3, dtype=None)
