"""Processes that start in milliseconds, and ranks that are such processes.

Each is a fork of one process that has imported all modules and computed nothing.
"""

import multiprocessing
import os
import runpy
import socket
import sys
from contextlib import closing

import pytest
import torch

MODULES = [
    *("pytest", "tyro", "tqdm", "matplotlib.pyplot", "parts.ranks"),
    *("pflcore.lab.cli", "pflcore.lab.cli._experiment", "pflcore.lab.results.table"),
]


def forking_context():
    """The context of multiprocessing whose processes are forks; else a skip."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        pytest.skip("no fork here")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(MODULES)
    return context


def run_ranks(count, program, *words, timeout=300):
    """The exit codes of a program's ranks, which find each other as torchrun's do.

    They take the place of torchrun, and save each rank its own import of torch.
    """
    context = forking_context()
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    ranks = []
    for rank in range(count):
        own = variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        args = (str(program), [str(word) for word in words], own)
        ranks.append(context.Process(target=_run_program, args=args))
    try:
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(timeout)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return [process.exitcode for process in ranks]


def _run_program(program, words, variables):
    """Runs a program as a process of its own would."""
    os.environ.update(variables)
    torch.seed()  # forks would draw the same numbers, processes of their own do not
    sys.argv = [program, *words]
    runpy.run_path(program, run_name="__main__")
