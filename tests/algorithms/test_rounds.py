"""Golden rounds of all families.

The numbers come from programs of the papers' formulas, tests/golden/make/, which share
no code with the package: of clients with small quadratic losses
(tests/golden/rounds.json), and of uploads alone (tests/golden/uploads.json).
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from places import golden
from small import (
    ENGINES,
    after,
    classed,
    joined,
    near,
    normed,
    points,
    quadratics,
    regression,
    some,
    t,
    two_layers,
)

from pflcore import evaluate
from pflcore.algorithms import ALGORITHMS, apply
from pflcore.simulation.round import RunConfig

KINDS = (classed, normed, points, quadratics, regression, two_layers)
CLIENTS = {f.__name__: f for f in KINDS}
ROUNDS = golden("rounds")
UPLOADS = golden("uploads")


def compare(found, wanted, case):
    """Asserts that all wanted numbers are found, within their tolerances."""
    for where, values in wanted["then"].items():
        for key, value in values.items():
            near(found[where][key], value, *case.get("tolerance", {}).get(where, ()))


@ENGINES
@pytest.mark.parametrize("name", ROUNDS)
def test_golden_rounds(name, engine):
    """Rounds of clients give the golden numbers of their case.

    The learning rate is four times the case's, and the schedule takes a quarter of it.
    What begins anew in every evaluation follows no schedule.
    """
    case = ROUNDS[name]
    kind, given = case["clients"]
    s = CLIENTS[kind](**given, engine=engine)
    quarter = replace(
        s.training, lr=4 * s.training.lr, schedule=lambda round, rounds: 0.25
    )
    s = replace(s, training=quarter)
    for options in case["options"]:
        alg = ALGORITHMS[case["method"]](**options)
        for name in ("finetune_lr", "alpha"):
            if getattr(alg, name, 0) is None:
                alg = replace(alg, **{name: quarter.lr / 4})
        state = joined(alg, s)
        # Clients that begin with numbers of their own are not new.
        state.participated[:] = "clients" in case.get("start", {})
        for where, tensors in case.get("start", {}).items():
            getattr(state, where).update({k: t(v) for k, v in tensors.items()})
        for want in case["rounds"]:
            state, done = after(alg, s, [want.get("ids", range(s.data.n))], state)
            found = {
                **vars(state),
                "done": vars(done),
                "evaluation": evaluate(RunConfig.of(alg, s), state),
            }
            found["report"] = alg.report(state.server, done.mix, done.cohort)
            compare(found, want, case)


@pytest.mark.parametrize("name", UPLOADS)
def test_golden_uploads(name):
    def tensors(lists):
        return {k: torch.from_numpy(np.array(v)) for k, v in lists.items()}

    case = UPLOADS[name]
    options = {
        k: t(v) if isinstance(v, list) else v for k, v in case["options"].items()
    }
    alg = ALGORITHMS[case["method"]](**options)
    state = alg.init(t(case["x0"]), case["n"]) | tensors(case.get("start", {}))
    participated = torch.zeros(case["n"], dtype=torch.bool)
    for want in case["rounds"]:
        cohort = some(case["n"], **want.get("cohort", {}))
        new = ~participated[cohort.ids]
        cohort = cohort._replace(new=new, participated=participated.clone())
        participated[cohort.ids] = True
        down = alg.send(state, cohort)
        changes, mix = alg.update(state, tensors(want["up"]), cohort)
        state = apply(state, changes)
        found = {"down": down, "state": state, "report": alg.report(state, mix, cohort)}
        compare(found, want, case)
