"""Factorized layers against their dense twins, in models, rows, engines and the written-out
gradient; initial scales; `factorize`."""

import pytest
import torch
from parts.factorized import D, model

from pflcore import Net
from pflcore.nn import factorize
from pflcore.ops.chain import chain_grad
from pflcore.train.chain import compiled


@pytest.mark.parametrize("bias", [False, True])
def test_the_gradient_written_out_is_autograds(bias):
    """Two factorized layers behind one another, as a chain: the gradient of every client's own
    samples."""
    net = Net(lambda: factorize(model(bias), (5, 6)))
    chain = compiled(net, (9,))
    gen = torch.Generator().manual_seed(0)
    noise = torch.randn(3, net.size, dtype=D, generator=gen)
    rows = (torch.stack([net.init(i) for i in range(3)]) + 0.1 * noise).requires_grad_()
    x, y = torch.randn(18, 9, dtype=D, generator=gen), torch.randint(0, 4, (18,), generator=gen)
    order, size = torch.arange(18).view(3, 6), torch.tensor([6, 6, 4])
    places = [at[:n] for at, n in zip(order, size, strict=True)]
    losses = torch.stack([net.loss(r, x[at], y[at]) for r, at in zip(rows, places, strict=True)])
    want = torch.autograd.grad(losses.sum(), rows)
    grad, loss = chain_grad(rows.detach(), *chain.head, x, y, None, order, size, None)
    torch.testing.assert_close((loss, grad), (losses.detach(), *want), rtol=1e-11, atol=1e-12)
