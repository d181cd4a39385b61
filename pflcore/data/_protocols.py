"""Motley's two settings (section 3.2), cross-silo and cross-device.

A setting says which clients train, and on which samples hyper-parameters are chosen and
results are reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pflcore.check import NonNegativeFloat, Seed32, checked, require
from pflcore.data._federation import Federation, HeldOut
from pflcore.data._inputs import IGNORED_LABEL
from pflcore.data._labels import ReaderOptions
from pflcore.data._ragged import Ragged
from pflcore.data._read import read_clients

# Shares of a client's samples that Motley holds out.
DEFAULT_SHARES = {"val": 0.15, "test": 0.15}


@dataclass(frozen=True)
class StudyProtocol:
    """A federation, and the roles of its clients in a study.

    Hyper-parameters are chosen with `without_test`. It has no test split, so no choice
    can depend on test data.

    Attributes:
        data: all clients, with every split
        train_clients: ids, int64, of the clients that take part in training
        tuning_clients: ids of the clients whose "val" samples decide on
            hyper-parameters
        report_clients: ids of the clients whose "test" samples give the reported
            numbers
        study: "cross-silo", "cross-device", or "" for neither
    """

    data: Federation
    train_clients: Tensor
    tuning_clients: Tensor
    report_clients: Tensor
    study: str

    @property
    def without_test(self) -> Federation:
        """The federation without its test split, for tuning."""
        index = dict(self.data.index)
        index.pop("test", None)
        return self.data._copy_with(index=index)

    def keep(self, fraction: float) -> StudyProtocol:
        """The protocol with a part of the reported clients' training samples.

        These samples are a client's personalization set. The first of them are kept, so
        the samples of a smaller fraction are among those of a larger one.

        Args:
            fraction: fraction of the samples that is kept, above 0 and at most 1
        """
        data = self.data.keep_fraction(fraction, self.report_clients)
        return replace(self, data=data)


def without_roles(data: Federation, setting: str = "") -> StudyProtocol:
    """The data without a change, with every client in every role."""
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
    """Motley's cross-silo study: every client's samples are split.

    Every client has every role. Without `val` and `test`, a client's samples are split
    into 70 % for training, 15 % for validation and 15 % for testing. A split that the
    federation already has stays, and only the missing one is taken from "train". With
    `val` or `test`, all of a client's samples are divided anew.

    Raises ValueError where samples are to be divided and their features were
    standardized before. Statistics of held-out samples would be in the features.

    Args:
        data: the federation whose clients' samples are split
        val: share of a client's samples for choosing hyper-parameters, from 0 to below
            1
        test: share of a client's samples for reported results, from 0 to below 1
        seed: seeds the choice of the samples
        standardize: standardize each client's features by its own training samples,
            after the split
    """
    if val is not None or test is not None:
        _check_unstandardized(data)
        data = data.split(val=val or 0.0, test=test or 0.0, seed=seed, of=None)
    else:
        missing = {s: v for s, v in DEFAULT_SHARES.items() if s not in data.splits}
        if missing:
            _check_unstandardized(data)
            # Motley's shares are of all samples, and "train" holds only this part.
            held_out = sum(v for s, v in DEFAULT_SHARES.items() if s not in missing)
            train_share = 1 - held_out
            shares: dict[str, Any] = {s: v / train_share for s, v in missing.items()}
            data = data.split(**shares, seed=seed)
    if standardize:
        data = data.standardize()
    return without_roles(data, "cross-silo")


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
    """Motley's cross-device study: the clients are split into three groups.

    The groups are the clients that train, the clients that choose hyper-parameters
    (validation), and the clients that are reported (test). The samples of a validation
    or test client are halved into a personalization set, its "train", and an evaluation
    set, its "val" or "test". Only the samples in the federation's "train" are used, as
    in Motley's EMNIST. Validation and test clients never take part in training: a
    method with client state evaluates them from a new client's state.

    Raises ValueError where the features were standardized before, and where a group
    would have no client.

    Args:
        data: the federation whose clients are split
        train: number (int) or fraction (float) of the clients that train
        val: number or fraction of the clients that choose hyper-parameters
        test: number or fraction of the clients that are reported
        seed: seeds the choice of the clients and the halves
        standardize: standardize each client's features by its own training samples; of
            a validation or test client these are its personalization set alone
    """
    groups = data.split_clients(train, val, test, seed)
    sizes = [len(ids) for ids in groups]
    fits = len(groups.val) and len(groups.test)
    require(fits, "val and test", f"at least one of {data.n} clients each", sizes)
    _check_unstandardized(data)
    data = data._copy_with(index={"train": data.lists("train")})
    data = data.split_in_half(groups.val, seed, scored="val")
    data = data.split_in_half(groups.test, seed, ("train",))
    if standardize:
        data = data.standardize()
    return StudyProtocol(data, *groups, "cross-device")


def _check_unstandardized(data: Federation) -> None:
    """Raises ValueError where the features were standardized.

    Statistics of samples that are about to be held out would be in the features.
    """
    expected = (
        "features that were not standardized before the samples are divided (make it "
        "with standardize=False, and give it here)"
    )
    require(data.scaling is None, "data", expected, data)


def with_validation(data: Federation, seed: int = 0, share: float = 0.2) -> Federation:
    """The federation with a split "val"; unchanged where it has one.

    The split is a random `share` of each client's training samples. A client with a
    single training sample keeps it, and has no validation sample.
    """
    if "val" in data.index:
        return data
    facts = {**data.facts, "held out for validation": share}
    return data.split(val=share, seed=seed)._copy_with(facts=facts)


def leave_out_unlabelled(data: Federation, label: int | None) -> Federation:
    """The federation of the samples that have a label other than `label`.

    A sample of several steps stays where one of its steps has a label. Its other steps
    get `IGNORED_LABEL`, which losses leave out. Where `label` is the last class, the
    classes are counted without it.

    Raises ValueError where clients have labels of their own (`relabel`).

    Args:
        data: the federation
        label: the label that counts in nothing; None for no label
    """
    y = data.y
    if label is None or y.is_floating_point():
        return data
    data = _mask_label(data, label)
    is_labelled = data.is_labelled
    if bool(is_labelled.all()):
        return data
    index = {}
    for split, lists in data.index.items():
        stays = is_labelled[lists.flat]
        rows = lists.flat[stays]
        owners = lists.owners()[stays]
        sizes = owners.cpu().bincount(minlength=data.n)
        index[split] = Ragged(rows, sizes)
    return data._copy_with(index=index)


def _mask_label(data: Federation, label: int) -> Federation:
    """The federation with `IGNORED_LABEL` in place of `label`."""
    y = data.y
    classes = data.classes
    if label == IGNORED_LABEL or not bool((y == label).any()):
        return data
    expected = f"None, as label {label} counts in nothing"
    require(data.relabel is None, "relabel", expected, data.relabel)
    y = y.masked_fill(y == label, IGNORED_LABEL)
    if classes == label + 1:
        known = y[y != IGNORED_LABEL]
        classes = int(known.max()) + 1 if known.numel() else 1
        if data.class_names:
            classes = label
    class_names = data.class_names and data.class_names[:classes]
    return data._copy_with(y=y, classes=classes, class_names=class_names)


def single_client_federation(
    samples: Any, columns: Sequence[str] | None = None, **options: Any
) -> Federation:
    """A federation of one client's samples, which have any readable form.

    Raises ValueError for a federation of several clients.

    Args:
        samples: the samples, as an entry of `Federation.from_clients`
        columns: order of a table's columns; None for the table's own
        options: fields of `ReaderOptions`
    """
    if isinstance(samples, Federation):
        data = samples
    else:
        # The meaning of labels is decided by all clients together, not by one of them.
        reader = ReaderOptions(**options, single_client=True)
        data = Federation(**read_clients([samples], reader, None, columns))
    require(data.n == 1, "samples", "those of one client", data)
    return data
