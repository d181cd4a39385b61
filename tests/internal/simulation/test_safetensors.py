"""The writer of safetensors files writes those of the package, and makes no copy."""

import tracemalloc

import pytest
import torch
from entry_points import sentence
from parts.memory import Making
from safetensors.torch import load_file, save
from small import equals, tiny_model

from pflcore import Server
from pflcore.simulation import checkpoint
from pflcore.simulation._safetensors import DTYPE_NAMES, write_safetensors

BIG = 1 << 20  # bytes of the tensor whose copy would be noticed


def test_the_bytes_are_those_of_the_package(tmp_path):
    tensors = {}
    for number, dtype in enumerate(DTYPE_NAMES):
        tensors[f"{9 - number % 3} \u00e9 {dtype}"] = torch.ones(3, number).to(dtype)
    tensors["a transposed one"] = torch.rand(3, 4).T
    tensors["a number"] = torch.tensor(2.5)
    path = tmp_path / "file"
    write_safetensors(path, tensors)
    plain = {name: tensor.contiguous() for name, tensor in tensors.items()}
    assert path.read_bytes() == save(plain)
    write_safetensors(path, tensors, {"about": "text"})
    for name, tensor in load_file(path).items():
        equals(tensor, tensors[name])
    with sentence("checkpoint: safetensors holds no torch.complex128", TypeError):
        write_safetensors(path, {"x": torch.zeros(2, dtype=torch.complex128)})


def save_server(folder):
    server = Server("ditto", tiny_model(), 4, rounds=1)
    server._state.server["x"] = torch.zeros(BIG // 4)
    return lambda: server.save(folder)


def save_tensors(folder):
    tensors = {"x": torch.zeros(BIG // 4)}
    return lambda: checkpoint.save(folder, tensors, {"round": 1})


@pytest.mark.parametrize("make", [save_server, save_tensors])
def test_a_checkpoint_is_written_without_a_copy(make, tmp_path):
    call = make(tmp_path)
    sizes = [0]
    tracemalloc.start()
    with Making(lambda made: sizes.append(made.nbytes)):
        call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tmp_path / checkpoint.FILE_NAME).stat().st_size > BIG
    assert max(sizes) + peak < BIG // 2
    assert checkpoint.load(tmp_path)[0]
