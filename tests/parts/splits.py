"""Sizes and equality of splits, for partitions and federations."""

import torch


def sizes(data, split="train"):
    return [len(rows) for rows in data.index[split]]


def same(a, b, split="train"):
    return all(map(torch.equal, a.index[split], b.index[split]))
