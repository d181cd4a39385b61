"""`pflcore.testing.check` names what is wrong with an algorithm, in one sentence, and nothing where nothing is."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

from pflcore import FedAvg, Stop, ops
from pflcore.data import federation_of
from pflcore.testing import CHECKS, Case, Fault, check


class ChangesDown(FedAvg):
    def send(self, g, cohort, gen):
        return {"x": g["x"].repeat(len(cohort.ids), 1)}

    def client(self, down, own, local):
        start = down["x"].clone()
        down["x"].copy_(local.fit(down["x"]).w)
        return own, {"delta": down["x"] - start}


class GrowingState(FedAvg):
    def init(self, net, n):
        return {"x": net.w0}, {"losses": torch.zeros(0)}

    def client(self, down, own, local):
        fit = local.fit(down["x"])
        return {"losses": torch.cat([own["losses"], fit.loss[:, None]], 1)}, {"delta": fit.w - down["x"]}


class UnknownState(FedAvg):
    def client(self, down, own, local):
        w = local.fit(down["x"]).w
        return {"v": w}, {"delta": w - down["x"]}


class OneRow(FedAvg):
    def client(self, down, own, local):
        return own, {"delta": (local.fit(down["x"]).w - down["x"]).mean(0)}


class Number(FedAvg):
    def client(self, down, own, local):
        return own, {"delta": local.fit(down["x"]).w - down["x"], "lr": local.lr}


class Everybody(FedAvg):
    """Forgets that some clients are absent."""

    def server(self, g, up, cohort):
        return {"x": g["x"] + torch.full((cohort.n,), 1 / cohort.n, dtype=torch.float64) @ up["delta"]}


class FirstComesFirst(FedAvg):
    def server(self, g, up, cohort):
        return {"x": g["x"] + up["delta"][0]}


class Divides(FedAvg):
    def server(self, g, up, cohort):
        return {"x": g["x"] + (up["delta"] / (cohort.round - 2)).mean(0)}


class GlobalNoise(FedAvg):
    def server(self, g, up, cohort):
        new = super().server(g, up, cohort)
        return {"x": new["x"] + 1e-3 * torch.randn_like(new["x"])}


class Remembers(FedAvg):
    def __init__(self):
        object.__setattr__(self, "server_lr", 1.0)
        object.__setattr__(self, "weighting", "samples")
        object.__setattr__(self, "seen", [0.0])

    def server(self, g, up, cohort):
        self.seen[0] += 0.1  # type: ignore[attr-defined]
        return {"x": ops.aggregate(up["delta"], cohort.share[None], base=g["x"], lr=self.seen[0])[0]}  # type: ignore[attr-defined]


class MixesClients(FedAvg):
    """Its update forgets that it sees the rows of several clients at once."""

    def client(self, down, own, local):
        def update(rows, grad, k):
            g = grad(rows["w"])
            return {"w": rows["w"] - local.lr * g / g.norm()}

        return own, {"delta": local.each_batch({"w": down["x"]}, update)["w"] - down["x"]}


class EvaluationTrains(FedAvg):
    def init(self, net, n):
        return {"x": net.w0}, {"w": net.w0}

    def personal(self, down, own, local):
        own["w"].copy_(local.fit(down["x"]).w)
        return {"w": own["w"]}


class SendsZeros(FedAvg):
    """A naive FedPer: the private columns do not move, but travel."""

    def client(self, down, own, local):
        delta = local.fit(down["x"]).w - down["x"]
        delta[:, local.net.mask("2.*")] = 0
        return own, {"delta": delta}


class NothingTrained(FedAvg):
    def client(self, down, own, local):
        return own, {"delta": torch.ones_like(down["x"])}


class ChangesTheModelItEvaluates(FedAvg):
    def report(self, g):
        g["x"].zero_()
        return {}


class BelievesWhatOverflows(FedAvg):
    """Sends what hides that training overflowed."""

    def client(self, down, own, local):
        delta = local.fit(down["x"]).w - down["x"]
        fine = delta.isfinite().all(1, keepdim=True)
        return own, {"delta": torch.where(fine, delta, 1.0), "fine": fine}

    def server(self, g, up, cohort):
        return {"x": g["x"] + torch.where(up["fine"], up["delta"], torch.nan).mean(0)}


class Misspelt(FedAvg):
    def personal(self, down, own, local):
        return {"w": own["v"]}


class TrainsOnTest(FedAvg):
    def client(self, down, own, local):
        w = local.fit(down["x"]).w
        better = local.loss(w, "test") < local.loss(down["x"], "test")
        return own, {"delta": (w - down["x"]) * torch.where(better, 1.0, local.loss(w, "test"))[:, None]}


class ListensToTheFirst(FedAvg):
    def server(self, g, up, cohort):
        new = super().server(g, up, cohort)
        return {"x": g["x"] + (new["x"] - g["x"]) / (1 + cohort.ids[0])}


class Float64(FedAvg):
    """Shares are float64, and what they are multiplied with becomes so."""

    def server(self, g, up, cohort):
        return {"x": g["x"] + self.server_lr * (cohort.share[:, None] * up["delta"]).sum(0)}


class EveryonesState(FedAvg):
    def init(self, net, n):
        return {"x": net.w0}, {"w": net.w0.repeat(n, 1)}


class Centres(FedAvg):
    """Subtracts what only the server can know."""

    def client(self, down, own, local):
        delta = local.fit(down["x"]).w - down["x"]
        return own, {"delta": 2 * delta - delta.mean(0)}


class GivesUp(FedAvg):
    def server(self, g, up, cohort):
        raise Stop("Three is a crowd.")


class OwnMean(FedAvg):
    def server(self, g, up, cohort):
        return {"x": g["x"] + ops.aggregate(up["delta"], cohort.share[None])[0]}


class Uniform(FedAvg):
    def server(self, g, up, cohort):
        return {"x": g["x"] + self.server_lr * up["delta"].mean(0)}


class NearlyAHook(FedAvg):
    def clinet(self, down, own, local):
        return own, {"delta": local.fit(down["x"], epochs=9).w - down["x"]}


class NoDecorator(FedAvg):
    server_lr: float = 0.1


@dataclass(frozen=True, slots=True)
class Declared(FedAvg):
    """Declares what plays no part, and calls its helper, whose name is nearly a hook's."""

    unused: ClassVar[tuple[str, ...]] = ("server_lr", "weighting")

    def server(self, g, up, cohort):
        return {"x": g["x"] + self.serve(up)}

    def serve(self, up):
        return up["delta"].mean(0)


@dataclass(frozen=True)
class Shared(FedAvg):
    """Keeps, as it should, everything that changes in its state."""

    def init(self, net, n):
        shared, private = net.split(net.w0, "2.*")
        return {"x": shared}, {"head": private}

    def client(self, down, own, local):
        w = local.fit(local.net.join(down["x"], own["head"], "2.*")).w
        shared, private = local.net.split(w, "2.*")
        return {"head": private}, {"delta": shared - down["x"]}

    def personal(self, down, own, local):
        return {"w": local.net.join(down["x"], own["head"], "2.*")}


FAULTS: dict[type[FedAvg], str] = {
    ChangesDown: r"client: down\['x'\] was changed in place",
    GrowingState: r"client: the state 'losses' of a client was \[0\] torch\.float32 and became \[1\]",
    UnknownState: r"client: its new state has 'v', which init gave no fresh client",
    OneRow: r"client: expected one row for each of the 4 clients in 'delta' of its upload, got shape \[53\]",
    Number: r"client: expected a tensor for 'lr' of its upload, got float",
    Everybody: r"server: raised RuntimeError with 2 of 4 clients",
    FirstComesFirst: r"server: own|the evaluation's \w+ depends on the clients' numbers",
    Divides: r"server: g\['x'\] is not finite on well-behaved data, after round 2",
    GlobalNoise: r"g\['x'\] differs between two runs of one seed",
    Remembers: r"g\['x'\] differs between two runs of one seed",
    MixesClients: r"g\['x'\] differs between the engines",
    EvaluationTrains: r"personal: own\['w'\] was changed in place",
    SendsZeros: r"client: the columns of '2\.weight' in the upload 'delta' are always zero, but are counted as sent",
    NothingTrained: r"client: another seed gives the same run",
    ChangesTheModelItEvaluates: r"report: g\['x'\] was changed in place",
    BelievesWhatOverflows: r"server: g\['x'\] is not finite after a client's update overflowed",
    TrainsOnTest: r"client or server: g\['x'\] depends on the split 'test'",
    ListensToTheFirst: r"server: the evaluation's \w+ depends on the clients' numbers",
    Float64: r"in float32, as runs are by default, client: raised RuntimeError with 2 of 4 clients: ",
    EveryonesState: r"init: the fresh state 'w' has a row for each of the 4 clients",
    Centres: r"client: the update of client 1 overflowed, and \{0, 2, 3\} were dropped with it",
    GivesUp: r"server: raised Stop with 4 of 4 clients: Three is a crowd\.",
    OwnMean: r"server_lr: another value gives the same run to the bit",
    Uniform: r"weighting: another value .* declare what plays no part: unused: ClassVar\[tuple\[str, \.\.\.\]\] = \('weighting',\)",
    NearlyAHook: r"clinet: no hook has this name, and no method calls it; did you mean 'client'\?",
    NoDecorator: r"server_lr: it is no option, because NoDecorator has no @dataclass\(frozen=True\) above it",
    Misspelt: r"personal: raised KeyError with 4 of 4 clients: 'v'",
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
        buffers = ("local", "average")

    model = lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))  # noqa: E731
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
    quick = [name for name in CHECKS if name not in ("shapes_stay", "bytes_are_counted", "broken_clients_are_absent", "engines_agree")]
    check("fedavg", model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), data=data, skip=quick)
    with pytest.raises(ValueError, match="at least 4 clients, got 3"):
        check("fedavg", data=data.subset([0, 1, 2]))


def test_a_watched_algorithm_is_the_algorithm():
    alg = Shared(server_lr=0.5)
    case = Case(alg)
    assert isinstance(case.watched, Shared) and case.watched.server_lr == 0.5 and type(case.watched).predict is FedAvg.predict
    assert type(alg).client is Shared.client
