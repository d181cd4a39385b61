"""Cores and memory that training takes for itself."""

import multiprocessing
import os
import re
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from pflcore import Evaluation, Federation, Hardware, Simulation, Training

STATUS = Path("/proc/self/status")


def federation(*shape, clients=3):
    gen = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(32, *shape, generator=gen), torch.arange(32) % 4) for _ in range(clients)]
    return Federation.from_arrays({"train": p, "test": p} for p in pairs)


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="the system does not bind processes to cores"
)
def test_there_are_as_many_workers_as_cores_that_may_be_used():
    allowed, before = os.sched_getaffinity(0), set(threading.enumerate())
    os.sched_setaffinity(0, {min(allowed)})
    try:
        simulation = Simulation(
            "fedavg",
            nn.Linear(6, 4),
            federation(6),
            Training(),
            rounds=1,
            hardware=Hardware(engine="loop"),
        )
        simulation.run()
    finally:
        os.sched_setaffinity(0, allowed)
    assert len(set(threading.enumerate()) - before) <= 1


@pytest.mark.parametrize(("width", "engine"), [(64, "vmap"), (100, "loop")])
def test_models_of_more_than_65536_weights_train_one_by_one(width, engine):
    """Steps of many such models at once fall out of the caches: up to twice a plain loop's time."""
    model = nn.Sequential(nn.Linear(784, width), nn.LeakyReLU(), nn.Linear(width, 4))
    assert (
        Simulation("fedavg", model, federation(784), Training(), rounds=1).header()["path"][
            "engine"
        ]
        == engine
    )


def trained(send):
    torch.set_num_threads(1)

    def resident():
        return int(re.search(r"VmRSS:\s+(\d+)", STATUS.read_text())[1]) >> 10

    layers = [
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
    ]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 4))
    simulation = Simulation(
        "fedavg",
        model,
        federation(3, 128, 128, clients=1),
        Training(0.01, 32),
        rounds=1,
        hardware=Hardware(workers=1),
        evaluation=Evaluation(every=0),
    )
    before = resident()
    simulation.run()
    send.send(
        (simulation.header()["path"]["form"], resident() - before, simulation.peak_bytes() >> 20)
    )


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
