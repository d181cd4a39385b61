"""The same FedAvg round in Flower's simulation and in Apple's pfl.

A round's time is the time between two of their aggregations, without the start. Both
are optional (the extra `bench`). Every client trains as `workload.train` does, on its
own samples of the workload's federation.
"""

import contextlib
import io
import itertools
import time
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import frameworks, workload
from bench.players.player import scored
from bench.problem import Absent, Facts, Measured
from pflcore.train._workers import single_threaded


def flower(w: workload.Workload) -> Measured:
    """Seconds of rounds of `run_simulation`, without evaluation.

    Each client has one CPU. The first round, which does not count, is one more.
    """
    if w.evaluate:
        raise Absent("not measured: an evaluation is a task of Ray's for every client")
    facts = frameworks.play("flwr", replace(w, rounds=w.rounds + 1))
    return Measured(facts["seconds"])


def apple(w: workload.Workload) -> Measured:
    """Seconds of rounds of pfl's `FederatedAveraging` on its `SimulatedBackend`."""
    from pfl import metrics
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel

    net = w.build()
    marks: list[float] = []

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def loss(self, x: Tensor, y: Tensor, is_eval: bool = False) -> Tensor:
            return F.cross_entropy(self.net(x), y)

        def metrics(self, x: Tensor, y: Tensor) -> Facts:
            n = len(x)
            loss, accuracy = scored(self.net, x, y)
            return {
                "loss": metrics.Weighted(n * loss, n),
                "accuracy": metrics.Weighted(n * accuracy, n),
            }

    class Clock(TrainingProcessCallback):  # type: ignore[misc]
        def after_central_iteration(self, *args: Any, **words: Any) -> tuple[bool, Any]:
            marks.append(time.perf_counter())
            return False, metrics.Metrics()

    module = Module()
    central_optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    wrapped = PyTorchModel(module, torch.optim.SGD, central_optimizer)

    def clients(split: str) -> Any:
        order = torch.randperm(w.n, generator=torch.Generator().manual_seed(0))
        turn = itertools.cycle(order.tolist())
        samples = workload.federation(w)
        return FederatedDataset(
            lambda i: Dataset(samples.client(i, split), user_id=str(i)),
            lambda: next(turn),
        )

    training = NNTrainHyperParams(
        local_num_epochs=w.epochs, local_learning_rate=w.lr, local_batch_size=w.batch
    )
    evaluated = w.n if w.evaluate else 0
    every = 1 if w.evaluate else 10**6
    plan = NNAlgorithmParams(
        central_num_iterations=w.rounds + 1,
        train_cohort_size=w.cohort,
        evaluation_frequency=every,
        val_cohort_size=evaluated,
    )
    backend = SimulatedBackend(training_data=clients("train"), val_data=clients("test"))
    evaluation = NNEvalHyperParams(local_batch_size=500)
    quiet = io.StringIO()
    with single_threaded(), torch.enable_grad(), contextlib.redirect_stdout(quiet):
        FederatedAveraging().run(
            plan, backend, wrapped, training, evaluation, callbacks=[Clock()]
        )
    return Measured(b - a for a, b in itertools.pairwise(marks))
