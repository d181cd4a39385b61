"""Training of WAFFLe's factorized MLP compared with a dense MLP.

The MLP of ten clients is 784-200-10 with 120 factors and batches of 10. A third
provider also draws WAFFLe's samples and adds its divergence.
"""

from typing import Any

from bench.problem import Calls, Problem, Size, Sizes
from bench.workload import Workload, cohort, federation
from pflcore import Net
from pflcore.algorithms._factorized_waffle import FactorizedWaffle
from pflcore.nn.models import model_for
from pflcore.train._select_engine import make_context

CLIENTS = 10


def sizes(quick: bool) -> Sizes:
    """Numbers of images of each client, for one epoch.

    The images are random, with a shape of 1 x 28 x 28.
    """
    yield {"images": 100}
    if not quick:
        yield {"images": 480}


def problem(size: Size) -> Problem:
    """The problem of a size."""
    w = Workload(
        name="",
        model="mlp",
        data="made up",
        n=CLIENTS,
        cohort=CLIENTS,
        samples=CLIENTS * size["images"],
        tests=0,
        batch=10,
        lr=0.04,
    )
    waffle = FactorizedWaffle(ranks=(120,))
    dense = Net(lambda: model_for("mlp", (1, 28, 28), 10, bias=False))
    factorized = waffle.prepare(dense)
    data = federation(w)
    on_dense, rows = cohort(make_context(dense, data, w.training))
    on_factors, factors = cohort(make_context(factorized, data, w.training))
    first = waffle.init_client({}, factorized, CLIENTS)
    own = {k: v.repeat(CLIENTS, 1) for k, v in first.items()}

    def sampled() -> Any:
        return waffle.train_rows(factors.clone(), own, on_factors)

    providers: Calls = {
        "factorized layers": lambda: on_factors.fit(factors),
        "dense layers": lambda: on_dense.fit(rows),
        "with sampling and divergence": sampled,
    }
    return Problem("factorized", size, providers)
