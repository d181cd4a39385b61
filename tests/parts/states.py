"""What the tests of states share."""

import torch


def same(a, b, only=slice(None)):
    """Whether two states are equal, to the last bit, or what they hold of `only`
    these clients."""
    one, two = (
        {
            **s.server,
            **{f"own {k}": v[only] for k, v in s.clients.items()},
            "b": s.buffers,
        }
        for s in (a, b)
    )
    return one.keys() == two.keys() and all(
        torch.equal(v, two[k]) for k, v in one.items()
    )
