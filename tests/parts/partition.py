"""What the tests of partition share."""

import numpy as np
import torch


def labels_with(counts, seed=0):
    """Labels with these class counts, in random order."""
    return np.random.RandomState(seed).permutation(np.repeat(np.arange(len(counts)), counts))


def sizes(part, split="train"):
    return [len(rows) for rows in part.index[split]]


def counts(part, y, split, classes=10):
    y = torch.as_tensor(y)
    return [torch.bincount(y[rows], minlength=classes).tolist() for rows in part.index[split]]
