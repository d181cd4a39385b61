"""`pflcore.testing.check` names a fault of an algorithm in one sentence.

It is silent where there is no fault.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import pytest
import torch
from entry_points import sentence
from small import layers

from pflcore import FedAvg, Stop, testing
from pflcore.algorithms import Algorithm, Claim, FedPer, Traits
from pflcore.lab.data import federation_of
from pflcore.testing import check

FAULTS = {}


def found(sentence):
    """Marks a class with the fault that `check` finds in it."""

    def mark(cls):
        FAULTS[cls] = sentence
        return cls

    return mark


class Trains(FedAvg):
    """FedAvg with other state and uploads of its clients.

    `gives` makes both from the update.
    """

    def train(self, down, client_state, clients):
        fit = clients.fit(down["x"])
        return *self.gives(fit.w - down["x"], client_state, clients), fit


class Steps(FedAvg):
    """FedAvg whose server adds `step` of the updates."""

    def update(self, state, up, cohort):
        return {"x": state["x"] + self.step(up["delta"], cohort)}, None


@found(r"train: down\['x'\] was changed in place")
class ChangesDown(FedAvg):
    def send(self, state, cohort):
        return {"x": state["x"].repeat(len(cohort.ids), 1)}

    def train(self, down, client_state, clients):
        start = down["x"].clone()
        fit = clients.fit(down["x"])
        down["x"].copy_(fit.w)
        return client_state, {"delta": down["x"] - start}, fit


@found(
    r"train: client_state\['losses'\] has shape \[4, 1\], init gave \[4, 0\]; keep "
    r"its form\."
)
class GrowingState(Trains):
    def init_client(self, down, net, n):
        return {"losses": torch.zeros(1, 0)}

    def gives(self, delta, own, clients):
        return {"losses": torch.cat([own["losses"], torch.zeros(len(delta), 1)], 1)}, {
            "delta": delta
        }


@found(r"train: client_state\['v'\] is new; let init_client make it\.")
class UnknownState(Trains):
    def gives(self, delta, own, clients):
        return {"v": delta}, {"delta": delta}


@found(
    r"train: expected a tensor with one row for each of the 4 clients as 'delta', .* "
    r"\[53\]"
)
class OneRow(Trains):
    def gives(self, delta, own, clients):
        return own, {"delta": delta.mean(0)}


@found(
    r"train: expected a tensor with one row for each of the 4 clients as 'lr', got 0\.1"
)
class Number(Trains):
    def gives(self, delta, own, clients):
        return own, {"delta": delta, "lr": clients.lr}


@found(r"round: raised ValueError in round 1 .* unpack \(expected 3, got 2\)")
class NoFit(FedAvg):
    def train(self, down, client_state, clients):
        return client_state, {"delta": clients.fit(down["x"]).w - down["x"]}


@found(r"update: raised RuntimeError with 2 of 4 clients")
class Everybody(Steps):
    """A server that forgets that some clients are absent."""

    def step(self, delta, cohort):
        return torch.full((cohort.n,), 1 / cohort.n, dtype=torch.float64) @ delta


@found(r"update: the evaluation's \w+ depends on the clients' numbers")
class ListensToTheFirst(Steps):
    def step(self, delta, cohort):
        return delta.mean(0) / (1 + cohort.ids[0])


@found(r"update: server\.x is not finite on well-behaved data, after round 2")
class Divides(Steps):
    def step(self, delta, cohort):
        return (delta / (cohort.round - 2)).mean(0)


@found(
    r"update or train: server\.x depends on the number of rounds of the run, .* traits"
)
class Fades(Steps):
    def step(self, delta, cohort):
        return delta.mean(0) * (1 - cohort.round / (2 * cohort.rounds))


@found(r"server\.x differs between two runs of one seed")
class GlobalNoise(Steps):
    def step(self, delta, cohort):
        return delta.mean(0) + 1e-3 * torch.randn_like(delta[0])


@found(r"server\.x differs between two runs of one seed")
class Remembers(Steps):
    def __init__(self):
        super().__init__()
        object.__setattr__(self, "times", [0.0])

    def step(self, delta, cohort):
        self.times[0] += 0.1
        return self.times[0] * delta.mean(0)


@found(r"update: state\['x'\] was changed in place")
class WritesIntoItsState(FedAvg):
    def update(self, state, up, cohort):
        return {"x": state["x"].add_(up["delta"].mean(0))}, None


@found(r"server\.x differs between the engines")
class MixesClients(FedAvg):
    """An update that mixes the rows of several clients."""

    def train(self, down, client_state, clients):
        def update(rows, grad, taken):
            g = grad(rows["w"])
            return {"w": rows["w"] - clients.lr * g / g.norm()}

        fit = clients.each_batch({"w": down["x"]}, update)
        return client_state, {"delta": fit.w - down["x"]}, fit


@found(r"model: client_state\['w'\] was changed in place")
class EvaluationTrains(FedAvg):
    def init_client(self, down, net, n):
        return {"w": net.w0[None]}

    def model(self, down, client_state, clients):
        client_state["w"].copy_(clients.fit(down["x"]).w)
        return {"w": client_state["w"]}


@found(
    r"train: the columns of '2\.weight' in the upload 'delta' are always zero, but are "
    r"counted"
)
class SendsZeros(Trains):
    """A naive FedPer.

    The private columns do not move, but are uploaded.
    """

    def gives(self, delta, own, clients):
        delta[:, clients.net.mask("2.*")] = 0
        return own, {"delta": delta}


@found(r"train: another seed gives the same run")
class NothingTrained(Trains):
    def gives(self, delta, own, clients):
        return own, {"delta": torch.ones_like(delta)}


@found(r"report: state\['x'\] was changed in place")
class ChangesTheModelItEvaluates(FedAvg):
    def report(self, state, mix, cohort):
        state["x"].zero_()
        return {}


@found(r"update: server\.x is not finite after a client's update overflowed")
class BelievesWhatOverflows(Trains):
    """Uploads values that hide an overflow in training."""

    def gives(self, delta, own, clients):
        fine = delta.isfinite().all(1, keepdim=True)
        return own, {"delta": torch.where(fine, delta, 1.0), "fine": fine}

    def update(self, state, up, cohort):
        return {
            "x": state["x"] + torch.where(up["fine"], up["delta"], torch.nan).mean(0)
        }, None


@found(r"train or update: server\.x depends on a client whose update was not finite")
class Centres(Trains):
    """Subtracts the mean of the cohort, which only the server can know."""

    def gives(self, delta, own, clients):
        return own, {"delta": 2 * delta - delta.mean(0)}


@found(r"train or update: server\.x depends on the split 'test'")
class TrainsOnTest(Trains):
    def gives(self, delta, own, clients):
        return own, {"delta": delta * clients.loss(delta, "test")[:, None]}


@found(
    r"in float32, as runs are by default, update: state\['x'\] has dtype "
    r"torch\.float64, init gave torch\.float32"
)
class Float64(Steps):
    """Multiplies updates by shares in float64.

    The product becomes float64 too.
    """

    def step(self, delta, cohort):
        return self.server_lr * (
            cohort.mean_weights(self.weighting).weight.T * delta
        ).sum(0)


class Counts(Trains):
    """Uploads a number beside its update."""

    def gives(self, delta, own, clients):
        return own, {"delta": delta, "count": clients.num_samples}


@found(
    r"uploads: expected the uploads of train, delta, count, got delta; give the shape "
    r"and dtype of 'count', as a Claim"
)
class UndecidedClaim(Counts):
    """Does not say which numbers it may be."""


@found(r"uploads: expected a Claim as 'count', which is no update, got a tensor")
class ClaimAsUpdate(Counts):
    def uploads(self, state, down, cohort):
        return super().uploads(state, down, cohort) | {"count": cohort.num_samples[0]}


@found(r"uploads: expected .*int64.* as 'count', which train uploads .*, got .*float32")
class ClaimOfAnotherDtype(Counts):
    def uploads(self, state, down, cohort):
        claim = Claim(torch.empty((), dtype=torch.float32), low=1)
        return super().uploads(state, down, cohort) | {"count": claim}


@found(r"update: raised Stop with 4 of 4 clients: Three is a crowd\.")
class GivesUp(FedAvg):
    def update(self, state, up, cohort):
        raise Stop("Three is a crowd.")


@found(
    r"server_lr: it is no option, because NoDecorator has no @dataclass\(frozen=True\) "
    r"above it"
)
class NoDecorator(FedAvg):
    server_lr: float = 0.1


@found(r"model: raised KeyError with 4 of 4 clients: 'v'")
class Misspelt(FedAvg):
    def model(self, down, client_state, clients):
        return {"w": client_state["v"]}


@found(r"init_clent: no hook has this name, did you mean 'init_client'; the name of a ")
class MisspeltHook(Trains):
    """A misspelt hook, without whose result another hook fails."""

    def init_clent(self, down, net, n):
        return {"head": down["x"]}

    def gives(self, delta, own, clients):
        return {"head": own["head"]}, {"delta": delta}


@found(
    r"needs_val: no run reads this attribute of Flags; write traits = Traits\(needs_v"
)
class Flags(FedAvg):
    needs_val = True


@found(
    r"server_lr: NoAnnotation's default 0\.5 is not taken, .* write server_lr: float = "
    r"0\.5\.$"
)
@dataclass(frozen=True)
class NoAnnotation(FedAvg):
    server_lr = 0.5


@pytest.mark.deep("together they take seconds", quick=8)
@pytest.mark.parametrize("broken", FAULTS, ids=lambda c: c.__name__)
@pytest.mark.filterwarnings("ignore")
def test_a_fault_is_named_in_one_sentence(broken):
    with pytest.raises(testing.Fault, match=FAULTS[broken]) as e:
        check(broken())
    assert "\n" not in str(e.value) and str(e.value).count(". ") == 0


@dataclass(frozen=True, slots=True)
class Declared(Algorithm):
    """An algorithm without a fault.

    All its options play a part, and it has a helper.
    """

    def update(self, state, up, cohort):
        return {"x": state["x"] + self.mean_update(up)}, None

    def mean_update(self, up):
        return up["delta"].mean(0)


@dataclass(frozen=True)
class Uses(FedAvg):
    """Attributes that hooks use in every way.

    They are used by name, with another option, through the class, at the evaluation,
    and when a client joins.
    """

    server_lr: float = 0.5
    times: int = 1
    half = 0.5
    bounds = (1, 2)
    table: ClassVar[dict] = {1: 1.0}

    def __post_init__(self):
        assert getattr(self, "bou" + "nds")[0] <= self.times

    @property
    def factor(self):
        return self.half if self.times == 1 else self.other()

    def other(self):
        return Uses.table[self.times]

    def scores(self, model, net, x):
        return net(model["w"], x)

    def send(self, state, cohort):
        return {"x": getattr(self, "sen" + "t")(state, cohort)}

    def sent(self, state, cohort):
        return state["x"].repeat(len(cohort.ids), 1)

    def update(self, state, up, cohort):
        return super().update(state, {"delta": self.factor * up["delta"]}, cohort)

    def predict(self, model, net, x):
        return self.scores(model, net, x)

    def assign_new_client(self, state, up, cohort):
        return dict(self.nothing)

    nothing = ()


class Own(FedAvg):
    traits = Traits(batch_norm=("local", "average"))


def normed():
    return layers("Linear 6 5, BatchNorm1d 5, ReLU, Linear 5 3")


@pytest.mark.deep("together they take seconds", quick=6)
@pytest.mark.parametrize(
    "alg, model",
    [
        (Declared, None),
        (Uses, None),
        # FedALA draws for each client, so its clients' numbers are not exchanged.
        ("fedala", None),
        (FedAvg, normed),  # averaged statistics are those of all clients
        (Own, normed),  # local statistics stay with their clients
    ],
)
def test_nothing_is_found_where_nothing_is_wrong(alg, model):
    check(alg, model=model)


def test_a_check_can_be_left_out():
    check(NothingTrained, skip=["seeds_differ"])


def test_ones_own_model_and_data():
    data = federation_of("digits", "A", 5, seed=0, train_samples=120)
    asked = {
        "shapes_stay",
        "bytes_are_counted",
        "broken_clients_are_absent",
        "engines_agree",
    }
    model = partial(layers, "Flatten, Linear 64 10")
    check("fedavg", model=model, data=data, skip=testing.CHECKS.keys() - asked)
    with sentence("clients: expected ids of clients from 0 to 2, each once, got"):
        check("fedavg", data=data.subset([0, 1, 2]))


def test_a_watched_algorithm_is_the_algorithm():
    watched = testing.Case(FedPer(server_lr=0.5)).watched
    assert isinstance(watched, FedPer) and watched.server_lr == 0.5
    assert (
        type(watched).predict is FedAvg.predict
        and type(watched).train is not FedPer.train
    )
