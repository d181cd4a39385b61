"""What the tests of partitions and of federations share: how large their splits are,
and whether they are the same."""

import torch


def sizes(data, split="train"):
    return [len(rows) for rows in data.index[split]]


def same(a, b, split="train"):
    return all(map(torch.equal, a.index[split], b.index[split]))
