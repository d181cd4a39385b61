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
    rows = torch.stack([net.init(i) for i in range(3)]) + 0.1 * torch.randn(
        3, net.size, dtype=D, generator=gen
    )
    x, y = torch.randn(18, 9, dtype=D, generator=gen), torch.randint(0, 4, (18,), generator=gen)
    order, size = torch.arange(18).view(3, 6), torch.tensor([6, 6, 4])
    leaf = rows.clone().requires_grad_()
    losses = torch.stack(
        [net.loss(leaf[i], x[order[i, :n]], y[order[i, :n]]) for i, n in enumerate(size.tolist())]
    )
    (want,) = torch.autograd.grad(losses.sum(), leaf)
    grad, loss = chain_grad(rows, *chain.head, x, y, None, order, size, None)
    torch.testing.assert_close(loss, losses.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad, want, rtol=1e-11, atol=1e-12)
