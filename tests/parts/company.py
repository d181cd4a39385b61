"""What the tests of company share: models by their layers, clients of odd sizes, and
what hooks make of a cohort or of parts of it."""

import torch
from small import layers

from pflcore import Clients, Federation, Hardware, Net, Simulation, Training
from pflcore.algorithms import ALGORITHMS

ACTIVATIONS = ("SiLU", "Sigmoid", "ELU", "Softplus", "Tanh", "ReLU", "GELU")
BODIES = {  # H hidden units, A the activation: the layers, a sample's shape
    "mlp": ("Linear 29 H, A, Linear H 3", (29,)),
    "batch norm": ("Linear 29 H, BatchNorm1d H, A, Linear H 3", (29,)),
    "conv": ("Conv2d 1 H 3, A, AvgPool2d 2, Flatten, Linear 4H 3", (1, 6, 6)),
}
# batches of 8: some end with one sample alone, which is computed by other code than
# several, and whose last digits depend on where in memory a client's row begins; some
# validate on one sample
SIZES = (17, 9, 25, 23, 12, 9, 16, 31, 20, 14, 11)
EVERYBODY = torch.arange(len(SIZES))


def model(body, activation, hidden=7, dtype=torch.float32):
    words = BODIES[body][0].replace("4H", str(4 * hidden)).replace("H", str(hidden))
    words = words.replace("A,", f"{activation},")
    return lambda: layers(words).to(dtype)


def federation(body, dtype=torch.float32, sizes=SIZES):
    """Three Gaussian classes, every second client with its labels turned."""
    gen, shape = torch.Generator().manual_seed(4), BODIES[body][1]
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
    dtype, hidden = how.pop("dtype", torch.float32), how.pop("hidden", 7)
    training = Training(**{"lr": 0.1, "batch_size": 8, "epochs": 2, **how})
    alg = algorithm if not isinstance(algorithm, str) else ALGORITHMS[algorithm]()
    where = Hardware(
        engine=engine, workers=workers, clients_per_block=clients_per_block
    )
    net = Net(model(body, activation, hidden, dtype), seed=1)
    return Simulation(alg, net, federation(body, dtype), training, 3, hardware=where)


def of_hooks(setting, ids, block=None, training=True):
    """What a client's hooks make of all that they are given: tensors [S, ...] by
    name."""
    n = len(ids)
    clients = Clients(setting, ids, 1, setting.net.b0.repeat(n, 1), block)
    x = setting.net.w0.expand(n, -1)

    def update(rows, grad, taken):
        return {"w": rows["w"] - 0.1 * grad(rows["w"]) - 0.2 * grad(rows["w"], 1)}

    fit = clients.fit(x)
    several = clients.each_batch({"w": x}, update, batches=2, steps=7)
    made = {
        "w": fit.w,
        "batch norm": fit.buffers,
        "loss": fit.loss,
        "several": several.w,
    }
    # of one sample
    made["own features"] = clients.after(fit).features(fit.w, "val")[0][:, 0]
    for split in ("train", "val"):
        made |= {f"own {split}": clients.after(fit).evaluate({"w": fit.w}, split)[0]}
        made |= {
            f"common {split}": clients.loss(x, split),
            f"grad {split}": clients.grad(x, split),
        }
    return made


def differing(part, whole, at):
    """The names under which a part has other bits than the whole has at its places."""
    return [k for k, v in part.items() if not torch.equal(v, whole[k][at])]
