"""Several threads of one process use pflcore at the same time, and each gets what it would get
alone."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pflcore import Federation, Hardware, Net, Simulation, Training


def federation():
    gen = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(12, 6, generator=gen), torch.arange(12) % 4) for _ in range(4)]
    return Federation.from_arrays(pairs, classes=4, test_fraction=0.2)


def small():
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x):
        scores: Tensor = self.head(x + torch.relu(self.inner(x)))
        return scores


def test_what_is_made_in_four_threads_is_what_is_made_alone():
    data = federation()

    def weights(seed):
        return Net(lambda: nn.Sequential(*[nn.Linear(6, 6) for _ in range(8)]), seed=seed).w0

    def run(seed):
        return (
            Simulation(
                "fedavg", small, data, Training(), rounds=2, seed=seed, hardware=Hardware(workers=1)
            )
            .run()
            .state.server["x"]
        )

    for make, count in ((weights, 60), (run, 24)):
        with ThreadPoolExecutor(4) as pool:
            together = list(pool.map(make, range(count)))
        assert all(torch.equal(make(seed), got) for seed, got in enumerate(together))


def test_weights_are_those_of_manual_seed_whatever_others_draw():
    def every_kind():
        m = small()
        nn.init.orthogonal_(m[0].weight)
        nn.init.trunc_normal_(m[2].weight)
        with torch.no_grad():
            m[2].bias.copy_(
                torch.randn(4) + torch.rand(4) + torch.randperm(4) + torch.randint(9, (4,))
            )
        return m

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        want = torch.cat([p.detach().flatten() for p in every_kind().parameters()])
    before = torch.get_rng_state()
    assert torch.equal(Net(every_kind, seed=3).w0, want)
    assert torch.equal(torch.get_rng_state(), before)


def beside(work):
    """`work()`, while another thread draws from all global generators and makes nets and
    simulations."""
    done = threading.Event()

    def busy():
        data = federation()
        while not done.is_set():
            torch.rand(1), np.random.rand(), random.random()
            Simulation("fedavg", Residual, data, Training(), rounds=1)

    other = threading.Thread(target=busy)
    other.start()
    try:
        return work()
    finally:
        done.set()
        other.join()


def test_a_run_survives_what_another_thread_makes_and_draws():
    def run():
        made = [
            Simulation(
                "fedavg",
                Residual,
                federation(),
                Training(),
                rounds=8,
                hardware=Hardware(engine="loop", workers=1),
            )
            for _ in range(6)
        ]
        return torch.stack([one.run().state.server["x"] for one in made])

    assert torch.equal(run(), beside(run))


@pytest.mark.parametrize(
    "draw",
    [np.random.rand, random.random, lambda: float(torch.rand(()))],
    ids=["NumPy", "Python", "torch"],
)
def test_a_model_that_draws_is_refused(draw, request):
    class Noisy(nn.Linear):
        def forward(self, x):
            return super().forward(x) * draw()

    whose = request.node.callspec.id
    with pytest.raises(
        ValueError, match=rf"^model: its forward pass draws from {whose}'s global generator"
    ):
        Simulation("fedavg", lambda: Noisy(6, 4), federation(), Training())
