"""Threads, cores and memory of simulations.

Several threads may use pflcore at once, each as if it were alone.
"""

import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from parts.memory import STATUS, in_a_process, resident
from parts.path import Own
from parts.user import simulation
from small import equals, images, layers, tiny_model
from torch import nn

from pflcore import Net, Training

FOUR = images((12,) * 4)


def prepared(model, data=None, rounds=1, seed=0, engine="auto", **options):
    where = {"model": model, "training": Training(), "workers": 1, "engine": engine}
    return simulation(data=data or FOUR, rounds=rounds, seed=seed, **where, **options)


def detour():
    return Own(lambda m, x: x[:, :4] + torch.relu(m.layer(x)))


@pytest.mark.deep("four threads at once")
def test_what_is_made_in_four_threads_is_what_is_made_alone():
    """Weights and runs do not depend on the work of other threads."""

    def weights(seed):
        return Net(lambda: layers(", ".join(["Linear 6 6"] * 8)), seed=seed).w0

    def run(seed):
        torch.rand(1), np.random.rand(), random.random()
        engine, model = ("loop", detour) if seed % 2 else ("auto", tiny_model())
        return prepared(model, FOUR, 4, seed, engine).run().state.server["x"]

    for make, count in ((weights, 30), (run, 16)):
        with ThreadPoolExecutor(4) as pool:
            together = list(pool.map(make, range(count)))
        equals(together, [make(seed) for seed in range(count)])


def test_weights_are_those_of_manual_seed_whatever_others_draw():
    def every_kind():
        m = tiny_model()()
        nn.init.orthogonal_(m[0].weight)
        nn.init.trunc_normal_(m[2].weight)
        drawn = (
            torch.randn(4) + torch.rand(4) + torch.randperm(4) + torch.randint(9, (4,))
        )
        m[2].bias.data = drawn
        return m

    before = torch.get_rng_state()
    got = Net(every_kind, seed=3).w0
    equals(torch.get_rng_state(), before)
    torch.manual_seed(3)
    equals(nn.utils.parameters_to_vector(every_kind().parameters()), got)


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"),
    reason="the system does not bind processes to cores",
)
def test_there_are_as_many_workers_as_cores_that_may_be_used():
    allowed = os.sched_getaffinity(0)
    before = set(threading.enumerate())
    os.sched_setaffinity(0, {min(allowed)})
    try:
        simulation(data=FOUR, engine="loop").run()
    finally:
        os.sched_setaffinity(0, allowed)
    assert len(set(threading.enumerate()) - before) <= 1


@pytest.mark.parametrize("width, engine", [(64, "vmap"), (100, "loop")])
def test_models_of_more_than_65536_weights_train_one_by_one(width, engine):
    """On a CPU, large models train one after another.

    Steps of many large models at once do not fit the caches. They take up to twice the
    time of a plain loop.
    """
    model = layers(f"Linear 784 {width}, ELU, Linear {width} 4")
    data = images((12,) * 4, (784,))
    automatic, asked = (
        prepared(model, data, engine=e).header() for e in ("auto", "vmap")
    )
    assert (automatic["engine"], asked["engine"]) == (engine, "vmap")
    assert (" weights, on a CPU" in automatic["path"]["why"]) is (engine == "loop")


def trained():
    torch.set_num_threads(1)
    first = "Conv2d 3 32 3 1 1, ReLU, MaxPool2d 2, Conv2d 32 64 3 1 1, ReLU"
    model = layers(f"{first}, AdaptiveAvgPool2d 1, Flatten, Linear 64 4")
    data = images((32,), (3, 128, 128))
    run = prepared(model, data, every=0)
    before = resident()
    run.run()
    return run.header()["engine"], resident() - before


@pytest.mark.deep("a process of its own")
@pytest.mark.skipif(
    not STATUS.exists(), reason="the system does not tell a process's memory"
)
def test_what_a_worker_keeps_of_large_images_is_bounded():
    engine, kept_bytes = in_a_process(trained)
    # In MiB; batches of 32 that are not split would take 150.
    assert engine == "chain" and kept_bytes >> 20 < 100
