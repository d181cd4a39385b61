"""A method that changes the form of a state is refused in its first round."""

from dataclasses import dataclass

import pytest
import torch
from entry_points import sentence
from small import images, tiny_model

from pflcore import FedAvg, Hardware, Simulation, Training
from pflcore.algorithms import RowUpdate, Traits
from pflcore.interop import Client, Server
from pflcore.testing import Fault, check

DATA = images((12, 12, 20))


@dataclass(frozen=True)
class Remembers(FedAvg):
    """FedAvg with a mean of the updates and a row for each client on the server."""

    def init(self, x0, n):
        return {"x": x0, "ema": torch.zeros_like(x0), "rows": x0.new_zeros(n, len(x0))}

    def update(self, state, up, cohort):
        changes, mix = super().update(state, up, cohort)
        ema = 0.5 * state["ema"] + 0.5 * up["delta"].mean(0)
        rows = RowUpdate(cohort.ids, up["delta"])
        new = {**changes, "ema": ema, "rows": rows}
        return {**new, **self.changed(new)}, mix

    def changed(self, new):
        return {}


def changing(name, change):
    """The class `Remembers` with a change of what `update` returns under a name."""

    @dataclass(frozen=True)
    class Changes(Remembers):
        def changed(self, new):
            return {name: change(new.get(name))}

    return Changes()


SERVERS = {
    "an axis more": ("ema", lambda v: v[None], "has shape [1, 59], init gave [59]"),
    "a number less": ("ema", lambda v: v[1:], "has shape [58], init gave [59]"),
    "a model longer": (
        "x",
        lambda v: torch.cat([v, v[:1]]),
        "has shape [60], init gave [59]",
    ),
    "a dtype": (
        "ema",
        lambda v: v.double(),
        "has dtype torch.float64, init gave torch.float32",
    ),
    "a device": ("ema", lambda v: v.to("meta"), "is on meta, init gave it on cpu"),
    "a number": ("ema", lambda v: 3.0, "is 3.0, init gave a tensor"),
    "a new tensor": ("new", lambda v: torch.zeros(3), "is new; let init make it"),
    "a row for each": (
        "rows",
        lambda v: torch.zeros(4, 59),
        "has shape [4, 59], init gave [3, 59]",
    ),
    "short rows": (
        "rows",
        lambda v: v._replace(rows=v.rows[:, 1:]),
        "has shape [3, 58], init gave [3, 59]",
    ),
    "few rows": (
        "rows",
        lambda v: v._replace(rows=v.rows[1:]),
        "has shape [2, 59], init gave [3, 59]",
    ),
}


def simulate(algorithm):
    model = tiny_model()()
    training = Training(lr=0.05, batch_size=5)
    return Simulation(algorithm, model, DATA, training, 2, hardware=Hardware(workers=1))


def play_sides(algorithm):
    server = Server(algorithm, tiny_model()(), 3)
    uploads = {}
    for i in range(3):
        client = Client(algorithm, tiny_model()(), DATA.client(i))
        uploads[i] = client.train(server.download(i))
    server.aggregate(uploads)


@pytest.mark.deep("together they take seconds", quick=8)
@pytest.mark.parametrize("case", SERVERS.values(), ids=SERVERS)
@pytest.mark.parametrize("play", [lambda alg: simulate(alg).run(), play_sides])
def test_a_server_state_of_another_form_is_refused(play, case):
    name, change, words = case
    with pytest.raises(ValueError) as e:
        play(changing(name, change))
    assert f"update: state[{name!r}] {words}" in str(e.value)
    assert sentence(e)


@pytest.mark.parametrize("case", SERVERS.values(), ids=SERVERS)
def test_check_finds_a_server_state_of_another_form(case):
    name, change, _ = case
    with pytest.raises(Fault, match=rf"update: state\['{name}'\] "):
        check(changing(name, change))


def test_the_form_of_an_unfaulty_state_is_taken():
    assert len(simulate(Remembers()).run().rounds) == 2
    play_sides(Remembers())


@dataclass(frozen=True)
class Lists(FedAvg):
    """FedAvg whose server keeps the length of each round's mean."""

    traits = Traits(growing_state=("lengths",))

    def init(self, x0, n):
        return {"x": x0, "lengths": x0.new_zeros(0)}

    def update(self, state, up, cohort):
        changes, mix = super().update(state, up, cohort)
        length = up["delta"].mean(0).norm()[None]
        return {**changes, "lengths": torch.cat([state["lengths"], length])}, mix


@pytest.mark.deep("it takes a second")
def test_a_list_that_traits_name_grows_and_goes_on(tmp_path):
    whole = simulate(Lists())
    whole.run(lambda r, _: r == 1 and whole.save(tmp_path))
    rest = simulate(Lists()).restore(tmp_path)
    assert len(rest.state.server["lengths"]) == 1
    rest.run()
    assert torch.equal(rest.state.server["lengths"], whole.state.server["lengths"])
    check(Lists)


@dataclass(frozen=True)
class Keeps(FedAvg):
    """FedAvg whose clients keep their last update."""

    def init_client(self, down, net, n):
        return {"v": torch.zeros_like(down["x"])}

    def train(self, down, client_state, clients):
        _, up, fit = super().train(down, client_state, clients)
        return self.kept(up["delta"]), up, fit

    def kept(self, v):
        return {"v": v}


def keeping(change):
    @dataclass(frozen=True)
    class Changes(Keeps):
        def kept(self, v):
            return change(v)

    return Changes()


CLIENTS = {
    "an axis more": (lambda v: {"v": v[:, None]}, "client_state['v'] has shape"),
    "a column less": (lambda v: {"v": v[:, 1:]}, "client_state['v'] has shape"),
    "a dtype": (lambda v: {"v": v.double()}, "client_state['v'] has dtype"),
    "no tensor": (lambda v: {"v": None}, "client_state['v'] is None"),
    "a tensor more": (lambda v: {"v": v, "u": v}, "client_state['u'] is new"),
    "a tensor less": (lambda v: {}, "client_state['v'] is gone"),
}


@pytest.mark.deep("together they take seconds", quick=8)
@pytest.mark.parametrize("case", CLIENTS.values(), ids=CLIENTS)
@pytest.mark.parametrize("play", [lambda alg: simulate(alg).run(), play_sides])
def test_a_client_state_of_another_form_is_refused(play, case):
    change, words = case
    with pytest.raises(ValueError) as e:
        play(keeping(change))
    assert str(e.value).startswith(f"train: {words}")
    assert sentence(e)
    with pytest.raises(Fault):
        check(keeping(change))


def test_an_added_tensor_is_no_state_to_continue_from():
    simulation = simulate(FedAvg())
    state = simulation.state
    state.server["other"] = torch.zeros(2)
    with pytest.raises(ValueError, match=r"^state: .* no server\.other") as e:
        simulate(FedAvg()).state = state
    assert sentence(e)
