"""Motley's two settings (section 3.2): who trains, on what hyper-parameters are chosen, on what
results are reported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pflcore.check import Seed, checked
from pflcore.data.federation import Federation
from pflcore.data.splits import STANDARDIZED


@dataclass(frozen=True)
class Protocol:
    """A federation with roles. Choices are made with `blind`, which has no test split, so no choice
    can look at test data."""

    data: Federation  # everybody, with every split
    train: Tensor  # ids of the clients that take part in training
    choose: Tensor  # ids of the clients whose "val" samples decide on hyper-parameters
    report: Tensor  # ids of the clients whose "test" samples give the reported numbers
    setting: str  # "cross-silo", "cross-device", or "" for neither

    @property
    def blind(self) -> Federation:
        """The federation without its test split: all that tuning gets to see."""
        return replace(
            self.data, index={s: lists for s, lists in self.data.index.items() if s != "test"}
        )

    def keep(self, fraction: float) -> Protocol:
        """With the first part of each reported client's training samples (its personalization set):
        1, 0.5 and 0.25 are nested."""
        return replace(self, data=self.data.keep(fraction, self.report))

    def out_of_distribution(self, size: int = 1000, seed: int = 13) -> Federation:
        """Everybody reported is evaluated on one sample, drawn without replacement from all their
        test samples (Motley, section 4.1).

        Where clients label differently (`relabel`), each sample keeps the label that its owner
        gives it.
        """
        lists, y = self.data.index["test"], self.data.y
        if self.data.relabel is not None:
            y = y.clone()
            for split in self.data.splits:
                for i, rows in enumerate(self.data.index[split]):
                    y[rows] = self.data.labels(i, split)
        pool = torch.cat([lists[i] for i in self.report.tolist()]).unique()
        drawn = torch.from_numpy(np.random.RandomState(seed).permutation(len(pool))[:size]).to(
            pool.device
        )
        pool, none = pool[drawn].sort().values, pool[:0]
        mine = set(self.report.tolist())
        index = {
            **self.data.index,
            "test": [pool if i in mine else none for i in range(self.data.n)],
        }
        return replace(
            self.data, y=y, relabel=None, index=index, name=f"{self.data.name}, out of distribution"
        )


def everybody(data: Federation) -> Protocol:
    """The data as they are: everybody trains, chooses on its "val" samples and is reported."""
    ids = torch.arange(data.n)
    return Protocol(data, ids, ids, ids, "")


@checked
def cross_silo(
    data: Federation,
    fractions: Mapping[str, float] | None = None,
    seed: Seed = 100,
    *,
    standardize: bool = False,
) -> Protocol:
    """Every client's samples are split, by default 70 / 15 / 15 %; everybody trains, chooses and is
    reported.

    What a federation holds out already, as "val" or "test", stays held out where `fractions` is
    None, and what it lacks is taken from "train"; with `fractions` all of a client's samples are
    divided anew, and a note says so. `standardize`: features by each client's own training samples,
    after the split. ValueError where the features were standardised before it: by samples that are
    held out now.
    """
    held = {"val", "test"} & set(data.splits)
    if fractions is not None:
        data = _not_standardized(data).split_samples(fractions, seed)
        again = f"{' and '.join(sorted(held))} were divided anew, with all samples"
        data = replace(data, notes=[*data.notes, again]) if held else data
    elif len(held) < 2:
        shares = {split: 0.15 for split in ("val", "test") if split not in held}
        # of a client's samples by Motley's shares, where some are held out
        rest = 1 - 0.15 * len(held)
        shares = {split: share / rest for split, share in shares.items()}
        pool = ("train",) if held else None
        data = _not_standardized(data).split_samples(
            {"train": 1 - sum(shares.values()), **shares}, seed, pool
        )
    data = data.standardized() if standardize else data
    return replace(everybody(data), setting="cross-silo")


@checked
def cross_device(
    data: Federation,
    train: float = 0.8,
    val: float = 0.1,
    test: float = 0.1,
    seed: Seed = 13,
    *,
    standardize: bool = False,
) -> Protocol:
    """The clients are split (numbers or fractions of them); a validation or test client's samples
    are halved into a personalization set, its "train", and an evaluation set, its "val" or "test".
    Uses the samples in "train" only, as Motley does for EMNIST.

    Validation and test clients never take part in training: a method with client state serves them
    from their fresh state. `standardize`: features by each client's own training samples, of a
    validation or test client by its personalization set alone. ValueError where the features were
    standardised before.
    """
    groups = data.split_clients(train, val, test, seed)
    if not len(groups.val) or not len(groups.test):
        raise ValueError(
            f"val and test: expected at least one client each, got {len(groups.val)} and "
            f"{len(groups.test)} of {data.n}."
        )
    halved = _not_standardized(data).halves(torch.cat([groups.val, groups.test]), seed, ("train",))
    none = torch.empty(0, dtype=torch.int64, device=data.device)
    chooses, reports = set(groups.val.tolist()), set(groups.test.tolist())
    scored = halved.index["test"]
    index = {
        "train": halved.index["train"],
        "val": [scored[i] if i in chooses else none for i in range(data.n)],
        "test": [scored[i] if i in reports else none for i in range(data.n)],
    }
    divided = replace(halved, index=index)
    return Protocol(
        divided.standardized() if standardize else divided,
        groups.train,
        groups.val,
        groups.test,
        "cross-device",
    )


def _not_standardized(data: Federation) -> Federation:
    """The data, or ValueError where statistics of what is about to be held out have gone into the
    features."""
    if STANDARDIZED in data.notes:
        raise ValueError(
            "data: expected features that were not standardised before the samples are divided "
            "(what is held out would have shaped them), "
            f"got {data.name!r}; make it with standardize=False and pass standardize=True here."
        )
    return data


def held_out(data: Federation, seed: int = 0, share: float = 0.2) -> Federation:
    """The same federation with a split "val": that share of each client's training samples, at
    random. As it is where it has one.

    A client with a single training sample keeps it and has none for validation.
    """
    if "val" in data.index:
        return data
    new = data.split_samples({"train": 1 - share, "val": share}, seed, pool=("train",))
    return replace(
        new,
        notes=[
            *new.notes,
            f"{share:.0%} of each client's training samples are held out for validation",
        ],
    )


def one_client(samples: Any, **options: Any) -> Federation:
    """One client's samples, however they come, as a federation of one."""
    if isinstance(samples, Federation):
        one = samples
    elif isinstance(samples, tuple | list | Mapping):
        one = Federation.from_arrays([samples], **options)
    else:
        one = Federation.from_datasets([samples], **options)
    if one.n != 1:
        raise ValueError(
            f"samples: expected those of one client, got a federation of {one.n}; give them one "
            "after the other."
        )
    return one
