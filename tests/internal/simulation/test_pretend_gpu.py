"""Tests of the pretended GPU.

It refuses what a GPU refuses, and it counts the calls that make the host wait.
"""

import pretend_gpu
import pytest
import torch
from internal.chains import Problem
from pretend_gpu import contexts, pretended_gpu, unrepeated, waits
from torch import Tensor
from torch.utils._pytree import tree_map_only

from pflcore.ops._chain import chain_eval, chain_grad, chain_train_
from pflcore.ops._library import references


def numbers(*shape, device="cpu"):
    return torch.arange(12.0).view(*shape or (3, 4)).to(device)


def test_tensors_of_cpu_and_card_are_refused():
    with (
        pretended_gpu() as gpu,
        pytest.raises(RuntimeError, match=r"one device.*cuda:0 and cpu"),
    ):
        numbers(device=gpu) + numbers()


def test_tensors_of_two_cards_are_refused():
    with (
        pretended_gpu(cards=2),
        pytest.raises(RuntimeError, match=r"one device.*cuda:0 and cuda:1"),
    ):
        numbers(device="cuda:0") + numbers(device="cuda:1")


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.zeros(3, device="cuda:1"),
        lambda: torch.tensor([1.0], device="cuda:1"),
        lambda: torch.zeros(3).to("cuda:1"),
        lambda: torch.zeros(3).cuda(1),
        lambda: torch.Generator("cuda:1"),
    ],
    ids=["zeros", "tensor", "to", "cuda", "Generator"],
)
def test_a_card_that_is_not_there_is_refused(call):
    with pretended_gpu(), pytest.raises(RuntimeError, match="invalid device ordinal"):
        call()


@pytest.mark.parametrize(
    "device, generator", [("cuda:0", "cpu"), ("cpu", "cuda:0"), ("cuda:0", "cuda:1")]
)
def test_a_generator_of_another_device_is_refused(device, generator):
    with pretended_gpu(cards=2):
        draws = torch.Generator(generator)
        like = torch.zeros(3, device=device)
        own = torch.Generator(device)
        for call in (
            lambda g: torch.randn(3, device=device, generator=g),
            lambda g: like.normal_(generator=g),
            lambda g: torch.randperm(3, device=device, generator=g),
        ):
            call(own)
            with pytest.raises(
                RuntimeError, match=f"'{device}' generator.*'{generator}'"
            ):
                call(draws)


@pytest.mark.parametrize(
    "look",
    [
        lambda t: t[0, 0].item(),
        lambda t: t.tolist(),
        lambda t: t.cpu(),
        lambda t: bool(t.any()),
        lambda t: t[t > 3],
        lambda t: t.nonzero(),
        lambda t: t.unique(),
        lambda t: t[0].long().bincount(),
        lambda t: t.repeat_interleave(t[:, 0].long(), 0),
        lambda t: torch.equal(t, t),
        lambda t: t[torch.tensor([0])],  # the indices are copied to the GPU
        lambda t: t.new_tensor([1.0]),
        lambda t: torch.tensor([1.0], device=t.device),
        lambda t: torch.zeros(3).to(t.device),
    ],
    ids=range(14),
)
def test_what_makes_the_host_wait_is_counted(look):
    with pretended_gpu() as gpu:
        t = numbers(device=gpu)
        waits.clear()
        look(t)
        assert waits


def test_what_is_pinned_makes_nobody_wait():
    with pretended_gpu() as gpu:
        t = torch.zeros(3).pin_memory().to(gpu, non_blocking=True)
        assert not waits and t.device == gpu


def test_pinning_works_on_the_current_card():
    with pretended_gpu(1, cards=2) as gpu:
        with torch.cuda.device(gpu):
            torch.zeros(3).pin_memory()
        assert contexts == {1}
        torch.zeros(3).pin_memory()
        assert contexts == {0, 1}


TWICE = [[0, 0, 1]]


@pytest.mark.parametrize(
    "call, name",
    [
        (lambda t, twice: t[0].index_add(0, twice[0], t[0, :3]), "index_add"),
        (
            lambda t, twice: t.clone().scatter_add_(1, twice.expand(3, -1), t),
            "scatter_add",
        ),
        (lambda t, twice: t.cumsum(1), "cumsum"),
    ],
)
def test_sums_in_any_order_are_noted(call, name):
    with pretended_gpu() as gpu:
        t = numbers(device=gpu)
        twice = torch.tensor(TWICE).to(gpu)
        call(t, twice)
        assert unrepeated == [name]


@pytest.mark.parametrize(
    "call",
    [
        lambda t, twice: t[0].index_add(0, twice[0, 1:], t[0, :2]),
        lambda t, twice: twice.cumsum(1),
        lambda t, twice: t.index_put((twice[0],), t, accumulate=True),
    ],
    ids=["each once", "integers", "sorted"],
)
def test_sums_in_one_order_are_not_noted(call):
    with pretended_gpu() as gpu:
        call(numbers(device=gpu), torch.tensor(TWICE).to(gpu))
        assert not unrepeated


def test_every_op_has_a_kernel_or_a_body_or_neither():
    """A new op or kernel must be entered here."""
    ops = {op.name().removeprefix("pflcore::") for op in references}
    # A GPU calls these kernels where products would be rounded.
    listed = {"rank1_listed", "rank1_listed_backward"}
    assert (
        ops - {"chain_grad"} - {*pretend_gpu.COMPOSED} | listed == pretend_gpu.KERNELS
    )


def on_card(op, gpu):
    """Calls a chain's op with tensors of the GPU, except the program."""

    def call(w, program, *rest, **options):
        rest, options = tree_map_only(Tensor, lambda t: t.to(gpu), (rest, options))
        return op(w.to(gpu), program, *rest, **options)

    return call


def test_an_op_without_a_kernel_runs_its_body():
    problem = Problem("linear", [3, 2])
    want = problem.grad()
    with pretended_gpu() as gpu:
        got = problem.grad(on_card(chain_grad, gpu))
        assert {t.device for t in got} == {gpu}
        waits.clear()
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one.cpu(), other)


@pytest.mark.parametrize("name", ["train", "evaluate"])
def test_an_op_without_kernel_and_body_is_refused(name):
    problem = Problem("linear", [3, 2])
    with (
        pretended_gpu() as gpu,
        pytest.raises(NotImplementedError, match="no kernel for CUDA"),
    ):
        if name == "train":
            problem.train(on_card(chain_train_, gpu))
        else:
            problem.evaluate(problem.w, on_card(chain_eval, gpu))
