"""Threads, cores and memory: several threads use pflcore at once, each as if alone, and training
takes what it may."""

import multiprocessing
import os
import random
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from small import images, tiny_model
from torch import nn

from pflcore import Evaluation, Hardware, Net, Simulation, Training

FOUR = images((12,) * 4)


def prepared(model, data=None, rounds=1, seed=0, engine="auto", **options):
    hardware = Hardware(workers=1, engine=engine)
    data = data or FOUR
    return Simulation(
        "fedavg", model, data, Training(), rounds, seed=seed, hardware=hardware, **options
    )


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x):
        return self.head(x + torch.relu(self.inner(x)))


def test_what_is_made_in_four_threads_is_what_is_made_alone():
    def weights(seed):
        return Net(lambda: nn.Sequential(*[nn.Linear(6, 6) for _ in range(8)]), seed=seed).w0

    def run(seed):
        return prepared(tiny_model(), FOUR, 2, seed).run().state.server["x"]

    for make, count in ((weights, 30), (run, 12)):
        with ThreadPoolExecutor(4) as pool:
            together = list(pool.map(make, range(count)))
        assert all(torch.equal(make(seed), got) for seed, got in enumerate(together))


def test_weights_are_those_of_manual_seed_whatever_others_draw():
    def every_kind():
        m = tiny_model()()
        nn.init.orthogonal_(m[0].weight)
        nn.init.trunc_normal_(m[2].weight)
        drawn = torch.randn(4) + torch.rand(4) + torch.randperm(4) + torch.randint(9, (4,))
        m[2].bias.data = drawn
        return m

    before = torch.get_rng_state()
    got = Net(every_kind, seed=3).w0
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(3)
    assert torch.equal(nn.utils.parameters_to_vector(every_kind().parameters()), got)


def beside(work):
    """`work()`, while another thread draws from all global generators and makes nets and
    simulations."""
    done = threading.Event()

    def busy():
        while not done.is_set():
            torch.rand(1), np.random.rand(), random.random()
            prepared(Residual)

    other = threading.Thread(target=busy)
    other.start()
    try:
        return work()
    finally:
        done.set()
        other.join()


def test_a_run_survives_what_another_thread_makes_and_draws():
    def run():
        made = [prepared(Residual, rounds=8, engine="loop") for _ in range(4)]
        return torch.stack([one.run().state.server["x"] for one in made])

    assert torch.equal(run(), beside(run))


STATUS = Path("/proc/self/status")


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="the system does not bind processes to cores"
)
def test_there_are_as_many_workers_as_cores_that_may_be_used():
    allowed, before = os.sched_getaffinity(0), set(threading.enumerate())
    os.sched_setaffinity(0, {min(allowed)})
    try:
        hardware = Hardware(engine="loop")
        Simulation("fedavg", nn.Linear(6, 4), FOUR, rounds=1, hardware=hardware).run()
    finally:
        os.sched_setaffinity(0, allowed)
    assert len(set(threading.enumerate()) - before) <= 1


@pytest.mark.parametrize("width, engine", [(64, "vmap"), (100, "loop")])
def test_models_of_more_than_65536_weights_train_one_by_one(width, engine):
    """Steps of many such models at once fall out of the caches: up to twice a plain loop's time."""
    model = nn.Sequential(nn.Linear(784, width), nn.LeakyReLU(), nn.Linear(width, 4))
    data = images((12,) * 4, (784,))
    found, asked = (prepared(model, data, engine=e).header()["path"] for e in ("auto", "vmap"))
    assert (found["engine"], asked["engine"]) == (engine, "vmap")
    assert (" weights, on a CPU" in found["why"]) is (engine == "loop")


def trained(send):
    torch.set_num_threads(1)

    def resident():
        return int(re.search(r"VmRSS:\s+(\d+)", STATUS.read_text())[1]) >> 10

    convolutions = (nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 64, 3, padding=1))
    first = (convolutions[0], nn.ReLU(), nn.MaxPool2d(2), convolutions[1], nn.ReLU())
    model = nn.Sequential(*first, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 4))
    data = images((32,), (3, 128, 128))
    simulation = prepared(model, data, evaluation=Evaluation(every=0))
    before = resident()
    simulation.run()
    form = simulation.header()["path"]["form"]
    send.send((form, resident() - before, simulation.peak_bytes() >> 20))


@pytest.mark.deep("a process of its own")
@pytest.mark.skipif(not STATUS.exists(), reason="the system does not tell a process's memory")
def test_what_a_worker_keeps_of_large_images_is_bounded_and_said():
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=trained, args=(send,))
    child.start()
    form, kept, said = receive.recv()
    child.join()
    # MiB; 150 where batches of 32 are taken whole
    assert form == "chain" and kept < 100 and 64 <= said < 100
