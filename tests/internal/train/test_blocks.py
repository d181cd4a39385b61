"""Tests of the blocks in which a cohort is computed.

The blocks depend on the whole cohort. A cohort that is cut at their borders has the
same bits as the whole.
"""

from dataclasses import replace

import pytest
import torch
from parts.company import (
    ACTIVATIONS,
    BODIES,
    EVERYBODY,
    differing,
    of_hooks,
    simulation,
)
from small import images
from torch import nn

from pflcore import Clients, Net, Training
from pflcore.algorithms._protocol import map_rows
from pflcore.train._context import CPU_BLOCK_CLIENTS
from pflcore.train._evaluate import align_memory
from pflcore.train._schedule import assign_blocks, split_by_block
from pflcore.train._select_engine import make_context

QUICK = [
    ("vmap", "mlp", "SiLU"),
    ("vmap", "batch norm", "Sigmoid"),
    ("vmap", "conv", "Tanh"),
    ("loop", "mlp", "SiLU"),
    ("loop", "conv", "GELU"),
    ("chain", "mlp", "Tanh"),
]
NO_CHAIN = "batch norm", "SiLU", "ELU", "Softplus", "GELU"


def cases():
    made = []
    for engine in ("loop", "vmap", "chain"):
        for body in BODIES:
            for activation in ACTIVATIONS:
                case = (engine, body, activation)
                if engine == "chain" and {body, activation} & {*NO_CHAIN, "Sigmoid"}:
                    continue
                deep = (
                    ()
                    if case in QUICK
                    else pytest.mark.deep("every activation and body", one_in=2)
                )
                made.append(pytest.param(*case, marks=deep))
    return made


def of_parts(setting, block):
    """The results of all hooks for each block, the last block first."""
    return [
        (at, of_hooks(setting, EVERYBODY[at], block[at]))
        for at in split_by_block(EVERYBODY, block)
    ]


@pytest.mark.deep("together they take seconds", quick=6)
@pytest.mark.parametrize("engine, body, activation", cases())
def test_a_cohort_in_parts_has_the_bits_of_the_whole(engine, body, activation):
    setting = simulation(engine, body, activation).config
    block = assign_blocks(setting, EVERYBODY)
    whole = of_hooks(setting, EVERYBODY)
    assert len(block.unique()) == (
        3 if setting.engine.autograd == "vmap" else len(EVERYBODY)
    )
    for at, part in of_parts(setting, block):
        assert differing(part, whole, at) == []


@pytest.mark.deep("together they take seconds", quick=6)
@pytest.mark.parametrize("engine, body, activation", QUICK)
def test_workers_change_no_bit_of_any_hook(engine, body, activation):
    one, two = (
        of_hooks(simulation(engine, body, activation, workers=n).config, EVERYBODY)
        for n in (1, 2)
    )
    assert differing(two, one, EVERYBODY) == []


@pytest.mark.deep("every width, dtype and optimizer", one_in=3)
@pytest.mark.parametrize("engine", ["loop", "vmap", "chain"])
@pytest.mark.parametrize("hidden", [1, 3, 5, 8, 13])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_odd_widths_in_parts_have_the_bits_of_the_whole(
    engine, hidden, dtype, optimizer
):
    activation = "Tanh" if engine == "chain" else "SiLU"
    how = {"hidden": hidden, "dtype": dtype, "local_optimizer": optimizer}
    setting = simulation(engine, "mlp", activation, **how).config
    whole = of_hooks(setting, EVERYBODY)
    for at, part in of_parts(setting, assign_blocks(setting, EVERYBODY)):
        assert differing(part, whole, at) == []


def test_blocks_are_made_of_the_cohort_and_its_sizes_alone():
    setting = simulation("vmap", "mlp", "SiLU").config
    size = setting.data.size()
    block = assign_blocks(setting, EVERYBODY)
    assert block.bincount().tolist() == [3, 4, 4]
    for larger, smaller in ((0, 1), (1, 2)):
        assert size[block == larger].min() >= size[block == smaller].max()
    for order in (EVERYBODY.flip(0), EVERYBODY.roll(4)):
        assert torch.equal(assign_blocks(setting, order), block[order])
    some = EVERYBODY[::2]
    assert assign_blocks(setting, some).bincount().tolist() == [3, 3]
    assert assign_blocks(
        replace(setting, clients_per_block=1), some
    ).sort().values.tolist() == [*range(6)]
    assert not assign_blocks(replace(setting, clients_per_block=6), some).any()


def test_two_threads_share_one_blocks_clients_where_that_is_much_work():
    for hidden, count in ((7, 1), (3000, 2)):
        setting = simulation(
            "vmap", "mlp", "SiLU", hidden=hidden, clients_per_block=CPU_BLOCK_CLIENTS
        ).config
        assert len(assign_blocks(setting, EVERYBODY).unique()) == count


def test_who_leaves_a_cohort_leaves_the_others_in_their_blocks():
    setting = simulation("vmap", "mlp", "SiLU").config
    buffers = setting.net.b0.repeat(len(EVERYBODY), 1)
    clients = Clients(setting, EVERYBODY, 1, buffers)
    kept = EVERYBODY % 3 != 0
    block = assign_blocks(setting, EVERYBODY)
    assert torch.equal(clients.take(kept).block_numbers, block[kept])
    again = clients.take(kept).take(EVERYBODY[kept] > 3)
    assert torch.equal(again.block_numbers, block[kept & (EVERYBODY > 3)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "f", [torch.sigmoid, torch.exp, lambda x: 0.9 ** (x * 50).round()]
)
def test_a_row_alone_has_the_bits_that_it_has_among_others(dtype, f):
    x = torch.rand(41, 13, dtype=dtype)
    whole = map_rows(f, x)
    torch.testing.assert_close(whole, f(x))
    for at in ([3], [40], [7, 2], list(range(17))):
        assert torch.equal(map_rows(f, x[at]), whole[at])


def test_memory_begins_alike_for_every_row():
    rows = torch.randn(5, 7)
    for row in rows:
        assert (
            torch.equal(align_memory(row), row)
            and align_memory(row).data_ptr() % 64 == 0
        )
    assert align_memory(rows).data_ptr() == rows.data_ptr()


def sgd_step(rows, grad, taken):
    return {"w": rows["w"] - 0.1 * grad(rows["w"])}


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_sample_that_joins_a_minibatch_counts_in_steps_of_ones_own(epochs):
    """Batch norm over single numbers cannot train on the last of 11 samples alone."""

    def build():
        parts = (nn.Conv2d(1, 3, 8), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten())
        return nn.Sequential(*parts, nn.Linear(3, 4)).double()

    data = images((7, 11, 16, 11, 12), (1, 8, 8))
    data = replace(data, x=data.x.double())
    ends = []
    for engine in ("loop", "chain"):
        net = Net(build, seed=3)
        training = Training(lr=0.1, batch_size=5, epochs=epochs)
        context = make_context(net, data, training, engine)
        start = net.w0.repeat(data.n, 1)
        for name in ("fit", "each_batch"):
            buffers = net.b0.repeat(data.n, 1)
            clients = Clients(context, torch.arange(data.n), 1, buffers)
            if name == "fit":
                ends.append(clients.fit(start).w)
            else:
                ends.append(clients.each_batch({"w": start}, sgd_step).w)
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], rtol=1e-9, atol=1e-12)
