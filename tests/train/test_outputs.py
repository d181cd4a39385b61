"""Models as transformers writes them: fields by keyword, scores as `logits`."""

from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from small import ENGINES, equals
from torch import nn

from pflcore import Federation, Hardware, Simulation, Training

WORDS = 7
CLASSES = 3


class Plain(nn.Module):
    """Model of one dict, whose output is the scores."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, 4)
        self.score = nn.Linear(4, CLASSES)

    def scores(self, input_ids, attention_mask):
        weight = attention_mask.to(self.embed.weight.dtype)[..., None]
        mean = (self.embed(input_ids) * weight).sum(1) / weight.sum(1)
        return self.score(mean)

    def forward(self, fields):
        return self.scores(**fields)


class Keywords(Plain):
    """The same model, in the form of transformers."""

    make_output = SimpleNamespace

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        scores = self.scores(input_ids, attention_mask)
        return self.make_output(loss=None, logits=scores)


class OutputDict(OrderedDict):
    """A dict whose keys are attributes, too, as ModelOutput is."""

    __getattr__ = OrderedDict.__getitem__


class KeywordsDict(Keywords):
    make_output = OutputDict


def sentences():
    clients = []
    for _ in range(3):
        mask = torch.ones(6, 5, dtype=torch.int64)
        mask[::2, 3:] = 0
        fields = {
            "input_ids": torch.randint(0, WORDS, (6, 5)),
            "attention_mask": mask,
        }
        clients.append((fields, torch.arange(6) % CLASSES))
    return Federation.from_clients(clients).split(test=0.3)


def run(model, data, engine):
    torch.manual_seed(1)
    training = Training(lr=0.1, batch_size=3)
    simulation = Simulation(
        "ditto",
        model(),
        data,
        rounds=2,
        training=training,
        hardware=Hardware(engine=engine),
    )
    return simulation.run()


@pytest.mark.deep("together they take seconds", quick=4)
@ENGINES
@pytest.mark.parametrize("model", [Keywords, KeywordsDict])
def test_logits_and_keywords_change_no_bit(model, engine):
    data = sentences()

    want = run(Plain, data, engine)
    got = run(model, data, engine)

    fields = data.fields.split_fields(data.x)
    for i in range(data.n):
        equals(got.model(i).scores(fields), want.model(i).scores(fields))
    # The trained module is called as its class is written.
    module = got.model(0).module()
    equals(module(**fields).logits, want.model(0).scores(fields))
    equals(module(fields).logits, want.model(0).scores(fields))
