"""What the tests of fields share."""

import torch
import torch.nn as nn

from pflcore import Federation
from pflcore.data import padded

WORDS, STEPS, CLASSES = 11, 6, 3


class Tagger(nn.Module):
    """A class for every step; the mask keeps padding out of the context."""

    def __init__(self, per_step):
        super().__init__()
        self.embed, self.head, self.per_step = (
            nn.Embedding(WORDS, 4),
            nn.Linear(5, CLASSES),
            per_step,
        )

    def forward(self, x):
        assert (
            x["tokens"].dtype == torch.int64
            and x["mask"].dtype == torch.bool
            and x["age"].dtype == torch.float32
        )
        mask = x["mask"].float()[..., None]
        z = self.embed(x["tokens"]) * mask
        context = z.sum(1) / mask.sum(1)
        if not self.per_step:
            return self.head(torch.cat([context, x["age"][:, None]], 1))
        every = torch.cat(
            [z + context[:, None], x["age"][:, None, None].expand(-1, z.shape[1], 1)], 2
        )
        return self.head(every).movedim(-1, 1)  # [B, C, T]


def sequences(n, gen):
    """Fields, a label of each sequence, and one of each step."""
    length = torch.randint(1, STEPS + 1, (n,), generator=gen)
    tokens, mask = padded(
        [torch.randint(1, WORDS, (int(t),), generator=gen) for t in length], length=STEPS
    )
    fields = {"tokens": tokens, "mask": mask, "age": torch.rand(n, generator=gen)}
    return fields, tokens.sum(1) % CLASSES, tokens % CLASSES


def federation(per_step, clients=4):
    gen = torch.Generator().manual_seed(3)
    made = [sequences(8 + 3 * i, gen) for i in range(clients)]
    return Federation.from_clients([(x, steps if per_step else y) for x, y, steps in made]).split(
        test=0.25
    )


TWO, LABELS = torch.zeros(2, 3), torch.tensor([0, 1])
