"""`pflcore.testing.check` names what is wrong with an algorithm, in one sentence, and nothing where
nothing is."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from pflcore import FedAvg, Stop
from pflcore.algorithms import Algorithm, Traits
from pflcore.data import federation_of
from pflcore.testing import CHECKS, Case, Fault, check


def moved(w, down):
    return {"delta": w - down["x"]}


class ChangesDown(FedAvg):
    def send(self, state, cohort):
        return {"x": state["x"].repeat(len(cohort.ids), 1)}

    def train(self, down, own, clients):
        start, fit = down["x"].clone(), clients.fit(down["x"])
        down["x"].copy_(fit.w)
        return own, {"delta": down["x"] - start}, fit


class GrowingState(FedAvg):
    def newcomer(self, down, net, n):
        return {"losses": torch.zeros(1, 0)}

    def train(self, down, own, clients):
        fit = clients.fit(down["x"])
        return (
            {"losses": torch.cat([own["losses"], fit.loss[:, None].float()], 1)},
            moved(fit.w, down),
            fit,
        )


class UnknownState(FedAvg):
    def train(self, down, own, clients):
        fit = clients.fit(down["x"])
        return {"v": fit.w}, moved(fit.w, down), fit


class OneRow(FedAvg):
    def train(self, down, own, clients):
        fit = clients.fit(down["x"])
        return own, {"delta": (fit.w - down["x"]).mean(0)}, fit


class Number(FedAvg):
    def train(self, down, own, clients):
        fit = clients.fit(down["x"])
        return own, {**moved(fit.w, down), "lr": clients.lr}, fit


class NoFit(FedAvg):
    def train(self, down, own, clients):
        return own, moved(clients.fit(down["x"]).w, down)


class Everybody(FedAvg):
    """Forgets that some clients are absent."""

    def update(self, state, up, cohort):
        return {
            "x": state["x"]
            + torch.full((cohort.n,), 1 / cohort.n, dtype=torch.float64) @ up["delta"]
        }, None


class FirstComesFirst(FedAvg):
    def update(self, state, up, cohort):
        return {"x": state["x"] + up["delta"][0]}, None


class Divides(FedAvg):
    def update(self, state, up, cohort):
        return {"x": state["x"] + (up["delta"] / (cohort.round - 2)).mean(0)}, None


class GlobalNoise(FedAvg):
    def update(self, state, up, cohort):
        changes, mix = super().update(state, up, cohort)
        return {"x": changes["x"] + 1e-3 * torch.randn_like(changes["x"])}, mix


class Remembers(FedAvg):
    def __init__(self):
        super().__init__()
        object.__setattr__(self, "times", [0.0])

    def update(self, state, up, cohort):
        self.times[0] += 0.1
        mix = cohort.mean()
        return {"x": mix.of(up["delta"], state["x"], self.times[0])[0]}, mix


class WritesIntoItsState(FedAvg):
    def update(self, state, up, cohort):
        return {"x": state["x"].add_(up["delta"].mean(0))}, None


class MixesClients(FedAvg):
    """Its update forgets that it sees the rows of several clients at once."""

    def train(self, down, own, clients):
        def update(rows, grad, taken):
            g = grad(rows["w"])
            return {"w": rows["w"] - clients.lr * g / g.norm()}

        fit = clients.each_batch({"w": down["x"]}, update)
        return own, moved(fit.w, down), fit


class EvaluationTrains(FedAvg):
    def newcomer(self, down, net, n):
        return {"w": net.w0[None]}

    def model(self, down, own, clients):
        own["w"].copy_(clients.fit(down["x"]).w)
        return {"w": own["w"]}


class SendsZeros(FedAvg):
    """A naive FedPer: the private columns do not move, but travel."""

    def train(self, down, own, clients):
        fit = clients.fit(down["x"])
        up = moved(fit.w, down)
        up["delta"][:, clients.net.mask("2.*")] = 0
        return own, up, fit


class NothingTrained(FedAvg):
    def train(self, down, own, clients):
        return own, {"delta": torch.ones_like(down["x"])}, clients.fit(down["x"])


class ChangesTheModelItEvaluates(FedAvg):
    def report(self, state, mix, cohort):
        state["x"].zero_()
        return {}


class BelievesWhatOverflows(FedAvg):
    """Sends what hides that training overflowed."""

    def train(self, down, own, clients):
        fit = clients.fit(down["x"])
        delta = fit.w - down["x"]
        fine = delta.isfinite().all(1, keepdim=True)
        return own, {"delta": torch.where(fine, delta, 1.0), "fine": fine}, fit

    def update(self, state, up, cohort):
        return {"x": state["x"] + torch.where(up["fine"], up["delta"], torch.nan).mean(0)}, None


class Misspelt(FedAvg):
    def model(self, down, own, clients):
        return {"w": own["v"]}


class TrainsOnTest(FedAvg):
    def train(self, down, own, clients):
        fit = clients.fit(down["x"])
        better = clients.loss(fit.w, "test") < clients.loss(down["x"], "test")
        scale = torch.where(better, 1.0, clients.loss(fit.w, "test"))[:, None]
        return own, {"delta": (fit.w - down["x"]) * scale}, fit


class ListensToTheFirst(FedAvg):
    def update(self, state, up, cohort):
        changes, mix = super().update(state, up, cohort)
        return {"x": state["x"] + (changes["x"] - state["x"]) / (1 + cohort.ids[0])}, mix


class Float64(FedAvg):
    """Shares are float64, and what they are multiplied with becomes so."""

    def update(self, state, up, cohort):
        mix = cohort.mean(self.weighting)
        return {"x": state["x"] + self.server_lr * (mix.weight.T * up["delta"]).sum(0)}, mix


class EveryonesState(FedAvg):
    def newcomer(self, down, net, n):
        return {"w": net.w0.repeat(3, 1)}


class Centres(FedAvg):
    """Subtracts what only the server can know."""

    def train(self, down, own, clients):
        fit = clients.fit(down["x"])
        delta = fit.w - down["x"]
        return own, {"delta": 2 * delta - delta.mean(0)}, fit


class GivesUp(FedAvg):
    def update(self, state, up, cohort):
        raise Stop("Three is a crowd.")


class OwnMean(FedAvg):
    def update(self, state, up, cohort):
        mix = cohort.mean(self.weighting)
        return {"x": mix.of(up["delta"], state["x"])[0]}, mix


class Uniform(FedAvg):
    def update(self, state, up, cohort):
        return {"x": state["x"] + self.server_lr * up["delta"].mean(0)}, None


class NearlyAHook(FedAvg):
    def trian(self, down, own, clients):
        fit = clients.fit(down["x"], epochs=9)
        return own, moved(fit.w, down), fit


class NoDecorator(FedAvg):
    server_lr: float = 0.1


@dataclass(frozen=True, slots=True)
class Declared(Algorithm):
    """Has no option that plays no part, and calls its helper, whose name is nearly a hook's."""

    def update(self, state, up, cohort):
        return {"x": state["x"] + self.updates(up)}, None

    def updates(self, up):
        return up["delta"].mean(0)


@dataclass(frozen=True)
class Shared(FedAvg):
    """Keeps, as it should, everything that changes in its state."""

    def initial(self, net):
        return {"x0": net.split(net.w0, "2.*")[0]}

    def newcomer(self, down, net, n):
        return {"head": net.split(net.w0, "2.*")[1][None]}

    def train(self, down, own, clients):
        fit = clients.fit(clients.net.join(down["x"], own["head"], "2.*"))
        shared, private = clients.net.split(fit.w, "2.*")
        return {"head": private}, {"delta": shared - down["x"]}, fit

    def model(self, down, own, clients):
        return {"w": clients.net.join(down["x"], own["head"], "2.*")}


FAULTS: dict[type[FedAvg], str] = {
    ChangesDown: r"train: down\['x'\] was changed in place",
    GrowingState: r"train: the state 'losses' of a client was \[0\] torch\.float32 "
    r"and became \[1\]",
    UnknownState: r"train: its new state has 'v', which newcomer gave nobody",
    OneRow: r"train: expected one row for each of the 4 clients in 'delta' of its upload, got "
    r"shape \[53\]",
    Number: r"train: expected a tensor for 'lr' of its upload, got float",
    NoFit: r"train: expected \(the clients' new state, their upload, the fit that counts\)",
    Everybody: r"update: raised RuntimeError with 2 of 4 clients",
    FirstComesFirst: r"update: clients|the evaluation's \w+ depends on the clients' numbers",
    Divides: r"update: server\.x is not finite on well-behaved data, after round 2",
    GlobalNoise: r"server\.x differs between two runs of one seed",
    Remembers: r"server\.x differs between two runs of one seed",
    WritesIntoItsState: r"update: state\['x'\] was changed in place",
    MixesClients: r"server\.x differs between the engines",
    EvaluationTrains: r"model: own\['w'\] was changed in place",
    SendsZeros: r"train: the columns of '2\.weight' in the upload 'delta' are always zero, but are "
    r"counted as sent",
    NothingTrained: r"train: another seed gives the same run",
    ChangesTheModelItEvaluates: r"report: state\['x'\] was changed in place",
    BelievesWhatOverflows: r"update: server\.x is not finite after a client's update overflowed",
    TrainsOnTest: r"train or update: server\.x depends on the split 'test'",
    ListensToTheFirst: r"update: the evaluation's \w+ depends on the clients' numbers",
    Float64: r"in float32, as runs are by default, (update|train): raised RuntimeError with 2 of 4 "
    r"clients: ",
    EveryonesState: r"newcomer: expected one row, or one for each client, in 'w' of its "
    r"result, got shape \[3, 53\]",
    Centres: r"train: the update of client 1 overflowed, and \{0, 2, 3\} were dropped with it",
    GivesUp: r"update: raised Stop with 4 of 4 clients: Three is a crowd\.",
    OwnMean: r"server_lr: another value gives the same run to the bit",
    Uniform: r"weighting: another value .* narrow it to one choice by its annotation, weighting: "
    r"Literal\[\.\.\.\]",
    NearlyAHook: r"trian: no hook has this name, and no method calls it; did you mean 'train'\?",
    NoDecorator: r"server_lr: it is no option, because NoDecorator has no "
    r"@dataclass\(frozen=True\) above it",
    Misspelt: r"model: raised KeyError with 4 of 4 clients: 'v'",
}


@pytest.mark.parametrize("broken", FAULTS, ids=lambda c: c.__name__)
@pytest.mark.filterwarnings("ignore")
def test_a_fault_is_named_in_one_sentence(broken):
    with pytest.raises(Fault, match=FAULTS[broken]) as e:
        check(broken())
    assert "\n" not in str(e.value) and str(e.value).count(". ") == 0


def test_nothing_is_found_where_nothing_is_wrong():
    check(Shared)
    check(Declared)


def test_averaged_statistics_are_everybodys():
    """The clients who are absent get them too; what is each client's own stays."""

    class Own(FedAvg):
        traits = Traits(batch_norm=("local", "average"))

    def model():
        return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))

    check(FedAvg, model=model)
    check(Own, model=model)


def test_a_method_that_draws_for_each_client_is_not_asked_for_its_numbers():
    check("fedala")


def test_a_check_can_be_left_out():
    check(NothingTrained, skip=["seeds_differ", "options_play_a_part"])
    with pytest.raises(ValueError, match=r"skip: expected some of names_are_known, .* got 'seeds'"):
        check(FedAvg, skip=["seeds"])


def test_ones_own_model_and_data():
    data = federation_of("digits", "A", 5, seed=0, train_samples=120)
    quick = [
        name
        for name in CHECKS
        if name
        not in ("shapes_stay", "bytes_are_counted", "broken_clients_are_absent", "engines_agree")
    ]
    check(
        "fedavg",
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)),
        data=data,
        skip=quick,
    )
    with pytest.raises(ValueError, match="at least 4 clients, got 3"):
        check("fedavg", data=data.subset([0, 1, 2]))


def test_a_watched_algorithm_is_the_algorithm():
    alg = Shared(server_lr=0.5)
    case = Case(alg)
    assert (
        isinstance(case.watched, Shared)
        and case.watched.server_lr == 0.5
        and type(case.watched).predict is FedAvg.predict
    )
    assert type(alg).train is Shared.train
