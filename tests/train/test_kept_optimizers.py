"""Optimizer states that clients keep from round to round (`keep_optimizer`)."""

from dataclasses import replace

import pytest
import torch
from entry_points import sentence
from parts.states import same
from small import equals, images, swept, tiny_model
from torch import nn

from pflcore import Hardware, Simulation, Training
from pflcore.algorithms import ALGORITHMS
from pflcore.interop import Client

DATA = images((12, 12, 20, 7))
MOMENTUM = Training(
    lr=0.05, batch_size=5, momentum=0.9, weight_decay=0.01, keep_optimizer=True
)
ADAMW = Training(
    lr=0.01,
    batch_size=5,
    local_optimizer="adamw",
    weight_decay=0.1,
    keep_optimizer=True,
)
MAKERS = {
    "sgd": lambda w: torch.optim.SGD(w, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda w: torch.optim.AdamW(w, lr=0.01, weight_decay=0.1),
}


def make(algorithm="fedavg", training=MOMENTUM, data=DATA, **options):
    settings = {"model": tiny_model()(), "rounds": 4, **options}
    return Simulation(algorithm, data=data, training=training, **settings)


@pytest.mark.parametrize("engine", ["loop", "vmap", "chain"])
@pytest.mark.parametrize("algorithm", ["local", "fedavg"])
def test_one_client_has_plain_torchs_uninterrupted_optimizer(algorithm, engine):
    """Four rounds of three whole batches are twelve steps of torch's optimizer."""
    data = images((12,))
    data = replace(data, x=data.x.double())
    for training in (MOMENTUM, ADAMW):
        model = tiny_model()().double()
        plain = tiny_model()().double()
        plain.load_state_dict(model.state_dict())
        optimizer = MAKERS[training.local_optimizer](plain.parameters())
        training = replace(training, batch_size=12, epochs=3)
        hardware = Hardware(engine=engine)
        run = make(algorithm, training, data, model=model, hardware=hardware)
        history = run.run()
        x, y = data.client(0)
        for _ in range(12):
            optimizer.zero_grad()
            nn.functional.cross_entropy(plain(x), y).backward()
            optimizer.step()
        got = history.model(0).scores(x)
        torch.testing.assert_close(got, plain(x).detach(), rtol=1e-9, atol=1e-11)
        fresh = replace(training, keep_optimizer=False)
        other = make(algorithm, fresh, data, model=model, hardware=hardware).run()
        assert not torch.allclose(got, other.model(0).scores(x), atol=1e-6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", swept(quick=("scaffold", "ditto")))
def test_a_kept_state_survives_a_break(name, tmp_path):
    """Clients that are absent keep theirs; a method without such a state is refused."""
    for number, training in enumerate((MOMENTUM, ADAMW)):
        folder = tmp_path / str(number)
        options = {"participation": 0.6}
        try:
            whole = make(name, training, **options)
            history = whole.run(lambda r, _, w=whole, f=folder: r == 2 and w.save(f))
        except ValueError as e:
            assert str(e).startswith("keep_optimizer: ") or "AdamW" in str(e)
            continue
        rest = make(name, training, **options).restore(folder)
        again = rest.run()
        assert same(whole.state, rest.state) and whole.state.optimizers
        for key, rows in whole.state.optimizers.items():
            equals(rows, rest.state.optimizers[key])
        x = DATA.client(1, "test")[0]
        equals(history.model(1)(x), again.model(1)(x))
        equals(history.adapt(DATA.client(2), 2)(x), again.adapt(DATA.client(2), 2)(x))
        other = make(name, training, **options)
        other.state = history.state
        assert other.state.round == 4
        with pytest.raises(ValueError, match="keep_optimizer is True there and False"):
            make(name, replace(training, keep_optimizer=False)).restore(folder)


def test_what_keeps_nothing_is_refused():
    with pytest.raises(ValueError, match="keep_optimizer: SGD without momentum") as e:
        Training(keep_optimizer=True)
    assert sentence(e)
    for name, words in (("pfedme", "takes steps of its own"),):
        with pytest.raises(ValueError, match=f"keep_optimizer: this .* {words}") as e:
            make(ALGORITHMS[name](), MOMENTUM).run()
        assert sentence(e)
    x, y = DATA.client(0)
    with pytest.raises(ValueError, match="keep_optimizer: expected False at a") as e:
        Client("fedavg", tiny_model(), (x, y), MOMENTUM)
    assert sentence(e)
