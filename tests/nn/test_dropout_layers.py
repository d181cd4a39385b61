"""Dropout within torch's recurrent and attention layers."""

import copy

import pytest
import torch
from entry_points import sentence
from small import alike
from torch import nn

from pflcore import Evaluation, Federation, Hardware, Net, Simulation, Training
from pflcore.nn.models import model_for

VOCABULARY = 11
STEPS = 6


class Recurrent(nn.Module):
    """Scores of the last step of a recurrent layer of a kind."""

    def __init__(self, kind, **options):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 4)
        self.layer = kind(4, 5, 2, dropout=0.4, **options)
        self.head = nn.Linear(5, 3)

    def forward(self, tokens):
        x = self.embedding(tokens)
        if not self.layer.batch_first:
            return self.head(self.layer(x.transpose(0, 1))[0][-1])
        return self.head(self.layer(x)[0][:, -1])


MODELS = {
    "lstm": lambda: model_for(
        "lstm", (STEPS,), 3, vocabulary=VOCABULARY, hidden=5, dropout=0.4
    ),
    "gru": lambda: Recurrent(nn.GRU),
    "transformer": lambda: model_for(
        "transformer", (STEPS,), 3, vocabulary=VOCABULARY, width=8, heads=2, layers=1
    ),
}
SLOW = pytest.mark.deep("other layers of torch's own")
EACH_MODEL = pytest.mark.parametrize(
    "name", [m if m == "gru" else pytest.param(m, marks=SLOW) for m in MODELS]
)


def texts(dtype=torch.float32):
    """Three clients with made-up tokens."""
    generator = torch.Generator().manual_seed(0)
    clients = []
    for size in (7, 9, 12):
        tokens = torch.randint(VOCABULARY, (size, STEPS), generator=generator)
        clients.append((tokens, tokens[:, 0] % 3))
    return Federation.from_clients(clients)


def play(name, rounds=2, make=None, **hardware):
    run = Simulation(
        "fedavg",
        make or MODELS[name],
        texts(),
        Training(0.1, batch_size=4),
        rounds=rounds,
        evaluation=Evaluation(every=0),
        hardware=Hardware(**{"engine": "loop", "workers": 1, **hardware}),
    )
    return run


def model_after(*args, **options):
    run = play(*args, **options)
    run.run()
    return run.state.server["x"]


@pytest.mark.deep("it takes a second")
@EACH_MODEL
def test_runs_repeat_on_workers_and_after_a_resume(name, tmp_path):
    want = model_after(name)

    assert torch.equal(model_after(name), want)
    assert torch.equal(model_after(name, workers=2), want)
    first = play(name)
    next(first.iterate())
    first.save(tmp_path)
    resumed = play(name).restore(tmp_path)
    resumed.run()
    assert torch.equal(resumed.state.server["x"], want)


@pytest.mark.deep("it takes a second")
@EACH_MODEL
def test_engines_drop_the_same_elements(name):
    def make():
        return MODELS[name]().double()

    def without_dropout():
        model = make()
        for layer in model.modules():
            if isinstance(layer, nn.Dropout):
                layer.p = 0.0
            elif hasattr(layer, "dropout") and not isinstance(layer.dropout, nn.Module):
                layer.dropout = 0.0
        return model

    want = model_after(name, make=make)

    alike(model_after(name, make=make, engine="vmap"), want)
    assert (model_after(name, make=without_dropout) - want).abs().max() > 1e-4


@EACH_MODEL
def test_evaluation_and_models_outside_are_torchs_own(name):
    model = MODELS[name]().eval()
    net = Net(model)
    tokens = texts().x

    torch.testing.assert_close(net(net.w0, tokens), model(tokens))
    torch.manual_seed(0)
    want = copy.deepcopy(model).train()(tokens)
    torch.manual_seed(0)
    assert torch.equal(copy.deepcopy(net.module).train()(tokens), want)


def test_a_layer_of_another_class_that_drops_out_is_refused():
    class Own(nn.LSTM):
        pass

    with sentence("model: its forward pass draws from torch's global generator"):
        play(None, make=lambda: Recurrent(Own))
