"""What was read of a federation decides nothing about federations made of it."""

import inspect
from dataclasses import fields
from functools import cached_property

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pflcore import Federation, cross_device, cross_silo
from pflcore.data._protocols import leave_out_unlabelled, with_validation
from pflcore.data._ragged import Ragged
from pflcore.simulation._models import with_extra_client

CLIENTS = ("a", "b", "c", "d")
# Methods that answer a question, with arguments that they accept.
QUESTIONS = {
    "size": {"labelled": True},
    "counts": {},
    "label_skew": {},
    "summary": {},
    "client_id": {"client": "b"},
    "names_of": {"ids": [0, 2]},
    "labels": {"i": 1},
    "client": {"i": 1},
    "__repr__": {},
}


def half_of(n):
    return {"train": torch.arange(n // 2), "test": torch.arange(n // 2, n)}


# Methods and functions that make another federation.
TRANSFORMATIONS = {
    "_copy_with": lambda data: data._copy_with(name="other"),
    "to": lambda data: data.to("meta"),
    "split": lambda data: data.split(val=0.2, test=0.3, of=None),
    "split_in_half": lambda data: data.split_in_half(of=None),
    "keep_fraction": lambda data: data.keep_fraction(0.4),
    "redistribute": lambda data: data.redistribute(half_of),
    "subset": lambda data: data.subset(["d", "b", "c"]),
    "with_columns": lambda data: data.with_columns(["v", "u"]),
    "standardize": lambda data: data.standardize(),
    "shift_features": lambda data: data.shift_features("noise"),
    "with_validation": lambda data: with_validation(data.subset([1, 3])),
    "leave_out_unlabelled": lambda data: leave_out_unlabelled(data, -100),
    "cross_silo": lambda data: cross_silo(data, 0.2, 0.2).data,
    "without_test": lambda data: cross_silo(data, 0.2, 0.2).without_test,
    "cross_device": lambda data: cross_device(data.subset(["d", "b", "c"]), 1, 1, 1),
    "with_extra_client": lambda data: with_extra_client(
        data, {"test": data.client(1)}, needs_val=False, seed=0
    ),
}


def federation(empty, unlabelled):
    """Four clients with everything that a federation can have.

    The client `empty` has no training samples; None for none. Some samples have no
    label.
    """
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(48, 2, generator=draws)
    y = torch.arange(48) % 3
    if unlabelled:
        y[::5] = -100
    train = list(torch.arange(36).split([6, 8, 10, 12]))
    if empty is not None:
        train[empty] = train[empty][:0]
    relabel = None
    if not unlabelled:
        relabel = torch.stack([torch.arange(3).roll(i) for i in range(4)])
    return Federation(
        x,
        y,
        {"train": train, "test": list(torch.arange(36, 48).split(3))},
        3,
        relabel,
        names=CLIENTS,
        columns=("u", "v"),
        class_names=("low", "mid", "high"),
        truth={"group": torch.arange(4) % 2},
    )


def read_everything(data):
    """Reads all that is public of a federation, and of its lists."""
    for lists in data.index.values():
        for name, member in inspect.getmembers(type(lists)):
            if isinstance(member, property | cached_property):
                getattr(lists, name)
        lists.owners()
    for name, member in inspect.getmembers(type(data)):
        if isinstance(member, property | cached_property):
            getattr(data, name)
    for name, arguments in QUESTIONS.items():
        getattr(data, name)(**arguments)


def assert_same(got, want):
    """Asserts that all answers of two results are equal."""
    if isinstance(want, Federation):
        for f in fields(want):
            assert_same(getattr(got, f.name), getattr(want, f.name))
        for name in ("n", "splits", "device", "shape", "is_labelled"):
            assert_same(getattr(got, name), getattr(want, name))
        assert_same(got.trainable_clients, want.trainable_clients)
    elif isinstance(want, Ragged):
        for name in ("flat", "size", "begin", "nonempty"):
            assert_same(getattr(got, name), getattr(want, name))
    elif isinstance(want, torch.Tensor):
        assert got.device == want.device
        assert got.shape == want.shape and got.dtype == want.dtype
        assert want.is_meta or torch.equal(got, want)
    elif isinstance(want, dict):
        assert got.keys() == want.keys()
        for key, value in want.items():
            assert_same(got[key], value)
    elif isinstance(want, tuple):
        assert len(got) == len(want)
        for pair in zip(got, want, strict=True):
            assert_same(*pair)
    elif hasattr(want, "__dataclass_fields__"):
        assert_same(vars(got), vars(want))
    else:
        assert got == want


@pytest.mark.parametrize("name", TRANSFORMATIONS)
@given(empty=st.sampled_from([None, 0, 1, 3]), unlabelled=st.booleans())
def test_reading_a_federation_changes_no_transformation(name, empty, unlabelled):
    transform = TRANSFORMATIONS[name]
    data = federation(empty, unlabelled)
    read_everything(data)

    try:
        want = transform(federation(empty, unlabelled))
    except ValueError as refusal:
        with pytest.raises(ValueError) as again:
            transform(data)
        assert str(again.value) == str(refusal)
        return

    assert_same(transform(data), want)


class Counted(Federation):
    """A federation of a user's own, which keeps what it has derived."""

    @cached_property
    def largest(self):
        return int(self.size().argmax())


@pytest.mark.parametrize("name", [n for n in TRANSFORMATIONS if n != "cross_device"])
def test_a_subclass_derives_its_facts_anew(name):
    data = federation(None, unlabelled=False)
    own = Counted(**{f.name: getattr(data, f.name) for f in fields(data)})
    assert own.largest == 3

    made = TRANSFORMATIONS[name](own)

    assert type(made) is Counted
    assert made.largest == int(made.size().argmax())


def test_ids_stay_on_the_cpu_when_data_move():
    data = federation(0, unlabelled=False)
    read_everything(data)

    moved = data.to("meta")

    assert moved.device.type == "meta"
    assert moved.trainable_clients.tolist() == [1, 2, 3]
    assert moved.size().device.type == "cpu"
