"""Models and federations for tests that compare a cohort with its parts.

The clients have odd numbers of samples. `of_hooks` gives the results of a client's
hooks for any cohort.
"""

import torch
from small import layers

from pflcore import Clients, Federation, Hardware, Net, Simulation, Training
from pflcore.algorithms import ALGORITHMS

ACTIVATIONS = ("SiLU", "Sigmoid", "ELU", "Softplus", "Tanh", "ReLU", "GELU")
BODIES = {  # layers (H hidden units, A activation), shape of a sample
    "mlp": ("Linear 29 H, A, Linear H 3", (29,)),
    "batch norm": ("Linear 29 H, BatchNorm1d H, A, Linear H 3", (29,)),
    "conv": ("Conv2d 1 H 3, A, AvgPool2d 2, Flatten, Linear 4H 3", (1, 6, 6)),
}
# In batches of 8, some clients end with one sample alone. It is computed by other code
# than several samples, and its last digits depend on where in memory a client's row
# begins. Some clients validate on one sample.
SIZES = (17, 9, 25, 23, 12, 9, 16, 31, 20, 14, 11)
EVERYBODY = torch.arange(len(SIZES))


def model(body, activation, hidden=7, dtype=torch.float32):
    words = BODIES[body][0].replace("4H", str(4 * hidden)).replace("H", str(hidden))
    words = words.replace("A,", f"{activation},")
    return lambda: layers(words).to(dtype)


def federation(body, dtype=torch.float32, sizes=SIZES):
    """Clients with three Gaussian classes.

    Every second client has its labels turned.
    """
    gen = torch.Generator().manual_seed(4)
    shape = BODIES[body][1]
    centre = torch.randn(3, *shape, generator=gen, dtype=dtype)

    def samples(n, turn):
        y = torch.randint(0, 3, (n,), generator=gen)
        return centre[y] + torch.randn(n, *shape, generator=gen, dtype=dtype), (
            y + turn
        ) % 3

    clients = [
        {
            "train": samples(n, i % 2),
            "val": samples(n // 8, i % 2),
            "test": samples(n, i % 2),
        }
        for i, n in enumerate(sizes)
    ]
    return Federation.from_clients(clients, classes=3, dtype=None)


def simulation(
    engine,
    body,
    activation,
    algorithm="fedavg",
    *,
    workers=1,
    clients_per_block=4,
    **how,
):
    """A run on clients of odd sizes, before its first round."""
    dtype = how.pop("dtype", torch.float32)
    hidden = how.pop("hidden", 7)
    training = Training(**{"lr": 0.1, "batch_size": 8, "epochs": 2, **how})
    alg = algorithm if not isinstance(algorithm, str) else ALGORITHMS[algorithm]()
    where = Hardware(
        engine=engine, workers=workers, clients_per_block=clients_per_block
    )
    net = Net(model(body, activation, hidden, dtype), seed=1)
    return Simulation(alg, net, federation(body, dtype), training, 3, hardware=where)


def of_hooks(setting, ids, block=None, training=True):
    """Tensors [S, ...] by name: the results of a client's hooks.

    The hooks receive everything that a run gives them.
    """
    n = len(ids)
    clients = Clients(setting, ids, 1, setting.net.b0.repeat(n, 1), block)
    x = setting.net.w0.expand(n, -1)

    def update(rows, grad, taken):
        return {"w": rows["w"] - 0.1 * grad(rows["w"]) - 0.2 * grad(rows["w"], 1)}

    fit = clients.fit(x)
    stepped = clients.each_batch({"w": x}, update, batches=2, steps=7)
    results = {
        "w": fit.w,
        "batch norm": fit.buffers,
        "loss": fit.loss,
        "several": stepped.w,
    }
    # Features of one sample.
    results["own features"] = clients.after(fit).features(fit.w, "val")[0][:, 0]
    for split in ("train", "val"):
        results |= {f"own {split}": clients.after(fit).evaluate({"w": fit.w}, split)[0]}
        results |= {
            f"common {split}": clients.loss(x, split),
            f"grad {split}": clients.grad(x, split),
        }
    return results


def differing(part, whole, at):
    """Names of the tensors whose rows differ in bits from the whole's."""
    return [k for k, v in part.items() if not torch.equal(v, whole[k][at])]
