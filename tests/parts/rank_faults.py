"""A program that ranks run: on one of them something goes wrong.

`rank_faults.py FOLDER FAULT ...` plays a run for each fault. Every rank writes a file
`faults-RANK.json` into the folder after each of them: what it raised, in what time, and
the rounds of its history.
"""

import json
import os
import signal
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import torch
from parts.ranks import MODELS, digest_records, make_simulation
from torch import nn

from pflcore.algorithms import FedAvg, Stop

# torchrun ends the ranks that are left when one has ended; they write their file first.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
RANK = int(os.environ["RANK"])


def own_rank():
    """The number of this rank; a constant in a rule would make it another rule."""
    return int(os.environ["RANK"])


CASE = {"algorithm": "fedavg", "rounds": 4, "participation": 1.0, "rank_timeout": 0.15}
warnings.simplefilter("ignore")


class Bad(nn.Module):
    """A model that calls a function in the third round's training on one rank."""

    def __init__(self, act):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.act = act

    def forward(self, x):
        if os.environ.get("BAD_ROUND") == "3" and own_rank() == 1:
            self.act()
        return self.layer(x)


def fail():
    raise ValueError("the layer is too hot")


def take_memory():
    raise MemoryError("tried to allocate 20.00 GiB")


def fall_silent():
    if not fall_silent.done:
        fall_silent.done = True
        time.sleep(30)


fall_silent.done = False


class BadServer(FedAvg):
    """A method whose server lacks memory in the third round on one rank."""

    def update(self, state, up, cohort):
        if cohort.round == 3 and own_rank() == 1:
            raise MemoryError("Tried to allocate 3.00 GiB")
        return super().update(state, up, cohort)


def draw_by_rank(round, generator, sizes):
    """A rule of sampling that breaks its promise: it differs from rank to rank."""
    return [own_rank()]


def bad_model(act):
    torch.manual_seed(0)
    simulation = make_simulation(CASE)
    hardware = replace(simulation.hardware, engine="loop")
    return replace(simulation, model=Bad(act), hardware=hardware)


def break_callback(round, record):
    if round == 2:
        raise OSError("no room for the record")


def stop_callback(round, record):
    if round == 2:
        raise Stop("Enough for today.")


def interrupt_callback(round, record):
    if round == 2:
        os.kill(os.getpid(), signal.SIGINT)


def play(fault):
    """Plays the run of one fault; the history's rounds and end."""
    os.environ.pop("BAD_ROUND", None)
    simulation = make_simulation(CASE)
    callback = None
    if fault == "data" and RANK == 1:
        simulation.data.x[0] += 1.0
    elif fault == "weights":
        model = MODELS["chain"]()  # its start is drawn without a seed
        simulation = replace(simulation, model=model)
    elif fault == "options" and RANK == 1:
        simulation = replace(simulation, participation=0.5)
    elif fault == "draws":
        simulation = replace(simulation, participation=0.2, sampling=draw_by_rank)
    elif fault == "place" and RANK == 1:
        return simulation.save("never")
    elif fault == "callback":
        callback = break_callback
    elif fault == "stop":
        callback = stop_callback
    elif fault == "interrupt":
        callback = interrupt_callback
    elif fault == "server":
        simulation = replace(simulation, algorithm=BadServer())
    elif fault in ("model", "memory", "silent", "killed"):
        acts = {
            "model": fail,
            "memory": take_memory,
            "silent": fall_silent,
            "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
        }
        return run_with_rounds(bad_model(acts[fault]))
    try:
        simulation.run(callback)
    finally:
        play.history = simulation.history
    return simulation.history


def run_with_rounds(simulation):
    """Plays by `run` with a model that must know the round."""
    original = type(simulation)._start_round

    def start_round(self, round):
        os.environ["BAD_ROUND"] = str(round)
        return original(self, round)

    type(simulation)._start_round = start_round
    try:
        simulation.run()
    finally:
        type(simulation)._start_round = original
        play.history = simulation.history
    return simulation.history


def main(folder, faults):
    seen = {}
    for fault in faults:
        start = time.monotonic()
        play.history = None
        error = None
        try:
            play(fault)
        except BaseException as e:
            error = f"{type(e).__name__}: {e}"
        history = play.history
        seen[fault] = {
            "error": error,
            "seconds": time.monotonic() - start,
            "rounds": None if history is None else len(history.rounds),
            "digest": None if history is None else digest_records(history.rounds),
            "cohorts": history and [record["cohort"] for record in history.rounds],
            "stopped": None if history is None else history.stopped,
            "interrupted": bool(history and history.interrupted),
        }
        Path(folder, f"faults-{RANK}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
