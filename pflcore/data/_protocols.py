"""Motley's two settings (section 3.2): who trains, on what hyper-parameters are chosen,
on what results are reported."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pflcore.check import NonNegativeFloat, Seed32, checked, require
from pflcore.data._federation import Federation, HeldOut
from pflcore.data._inputs import IGNORED_LABEL
from pflcore.data._meaning import ReaderOptions

DEFAULT_SHARES = {"val": 0.15, "test": 0.15}  # Motley's split of a client's own samples


@dataclass(frozen=True)
class StudyProtocol:
    """A federation with roles. Choices are made with `without_test`, which has no test
    split, so no choice can look at test data."""

    data: Federation  # everybody, with every split
    train_clients: Tensor  # ids of the clients that take part in training
    # ids of the clients whose "val" samples decide on hyper-parameters
    tuning_clients: Tensor
    # ids of the clients whose "test" samples give the reported numbers
    report_clients: Tensor
    study: str  # "cross-silo", "cross-device", or "" for neither

    @property
    def without_test(self) -> Federation:
        """The federation without its test split: all that tuning gets to see."""
        kept = {s: lists for s, lists in self.data.index.items() if s != "test"}
        return self.data._copy_with(index=kept)

    def keep(self, fraction: float) -> StudyProtocol:
        """With the first part of each reported client's training samples (its
        personalization set): 1, 0.5 and 0.25 are nested."""
        return replace(
            self, data=self.data.keep_fraction(fraction, self.report_clients)
        )


def without_roles(data: Federation, setting: str = "") -> StudyProtocol:
    """The data as they are: everybody trains, chooses on its "val" samples and is
    reported."""
    ids = torch.arange(data.n)
    return StudyProtocol(data, ids, ids, ids, setting)


@checked
def cross_silo(
    data: Federation,
    val: HeldOut | None = None,
    test: HeldOut | None = None,
    seed: Seed32 = 100,
    *,
    standardize: bool = False,
) -> StudyProtocol:
    """Every client's samples are split; everybody trains, chooses and is reported.

    What a federation holds out already, as "val" or "test", stays held out, and what it
    lacks of 70 / 15 / 15 % is taken from "train"; with `val` and `test`, shares, all of
    a client's samples are divided anew. `standardize`: each client's features by its
    own training samples, after the split. ValueError where the features were
    standardized before it: by samples that are held out now.
    """
    lacks = {s: share for s, share in DEFAULT_SHARES.items() if s not in data.splits}
    if val is not None or test is not None:
        data = _require_unstandardized(data).split(
            val=val or 0.0, test=test or 0.0, seed=seed, of=None
        )
    elif lacks:
        # of a client's samples by Motley's shares, where some are held out
        rest = 1 - 0.15 * (2 - len(lacks))
        shares: dict[str, Any] = {s: share / rest for s, share in lacks.items()}
        data = _require_unstandardized(data).split(**shares, seed=seed)
    return without_roles(data.standardize() if standardize else data, "cross-silo")


@checked
def cross_device(
    data: Federation,
    train: NonNegativeFloat = 0.8,
    val: NonNegativeFloat = 0.1,
    test: NonNegativeFloat = 0.1,
    seed: Seed32 = 13,
    *,
    standardize: bool = False,
) -> StudyProtocol:
    """The clients are split (numbers or fractions of them); a validation or test
    client's samples are halved into a personalization set, its "train", and an
    evaluation set, its "val" or "test". Uses the samples in "train" only, as Motley
    does for EMNIST.

    Validation and test clients never take part in training: a method with client state
    serves them from their fresh state. `standardize`: features by each client's own
    training samples, of a validation or test client by its personalization set alone.
    ValueError where the features were standardized before.
    """
    groups = data.split_clients(train, val, test, seed)
    some = len(groups.val) and len(groups.test)
    require(
        some,
        "val and test",
        f"at least one of {data.n} clients each",
        [len(g) for g in groups],
    )
    data = _require_unstandardized(data)._copy_with(
        index={"train": data.lists("train")}
    )
    data = data.split_in_half(groups.val, seed, scored="val").split_in_half(
        groups.test, seed, ("train",)
    )
    return StudyProtocol(
        data.standardize() if standardize else data, *groups, "cross-device"
    )


def _require_unstandardized(data: Federation) -> Federation:
    """The data, or ValueError where statistics of what is about to be held out have
    gone into the features."""
    wanted = (
        "features that were not standardized before the samples are divided (make it "
        "with "
    )
    require(
        data.scaling is None,
        "data",
        f"{wanted}standardize=False, and give it here)",
        data,
    )
    return data


def with_validation(data: Federation, seed: int = 0, share: float = 0.2) -> Federation:
    """The same federation with a split "val": that share of each client's training
    samples, at random. As it is where it has one.

    A client with a single training sample keeps it and has none for validation.
    """
    if "val" in data.index:
        return data
    facts = {**data.facts, "held out for validation": share}
    return data.split(val=share, seed=seed)._copy_with(facts=facts)


def mask_ignored_label(data: Federation, label: int) -> Federation:
    """The same federation with `IGNORED_LABEL` for `label`, which the loss leaves out;
    classes that were counted by it are counted without it.

    ValueError where clients have labels of their own for it.
    """
    y = data.y
    classes = data.classes
    if label == IGNORED_LABEL or y.is_floating_point() or not bool((y == label).any()):
        return data
    require(
        data.relabel is None,
        "relabel",
        f"None, as label {label} counts in nothing",
        data.relabel,
    )
    y = y.masked_fill(y == label, IGNORED_LABEL)
    if classes == label + 1:
        known = y[y != IGNORED_LABEL]
        classes = int(known.max()) + 1 if known.numel() else 1
    return data._copy_with(y=y, classes=classes)


def single_client_federation(samples: Any, **options: Any) -> Federation:
    """One client's samples, however they come, as a federation of one."""
    one = samples if isinstance(samples, Federation) else None
    # what labels mean is a fact of the whole federation, which one client does not show
    one = one or Federation._from_reader(
        [samples], ReaderOptions(**options, single_client=True)
    )
    require(one.n == 1, "samples", "those of one client", one)
    return one
