"""Ten clients of WAFFLe's MLP (784-200-10, 120 factors, batches of 10): its layers
beside dense ones, and with all that it draws."""

from bench.problem import Problem, Size, Sizes
from bench.workload import Workload, cohort, federation
from pflcore import Net
from pflcore.algorithms._factorized_waffle import FactorizedWaffle
from pflcore.nn.models import model_for
from pflcore.train._select_engine import make_context

CLIENTS = 10


def sizes(quick: bool) -> Sizes:
    """One epoch of `images` made-up images of 1 x 28 x 28 for each of ten clients."""
    for images in (100,) if quick else (100, 480):
        yield {"images": images}


def problem(size: Size) -> Problem:
    w = Workload(
        "", "mlp", "made up", CLIENTS, CLIENTS, CLIENTS * size["images"], 0, 10, 0.04
    )
    waffle = FactorizedWaffle(ranks=(120,))
    dense = Net(lambda: model_for("mlp", (1, 28, 28), 10, bias=False))
    factorized = waffle.prepare(dense)

    (on_dense, rows), (on_factors, factors) = (
        cohort(make_context(net, federation(w), w.training))
        for net in (dense, factorized)
    )
    first = waffle.init_client({}, factorized, CLIENTS)
    own = {k: v.repeat(CLIENTS, 1) for k, v in first.items()}
    return Problem(
        "factorized",
        size,
        {
            "factorized layers": lambda: on_factors.fit(factors),
            "dense layers": lambda: on_dense.fit(rows),
            "with sampling and divergence": lambda: waffle.train_rows(
                factors.clone(), own, on_factors
            ),
        },
    )
