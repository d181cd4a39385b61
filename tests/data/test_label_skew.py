"""WAFFLe's partitions, the measures of its Table 2, and the reproduction's table."""

import numpy as np
import pytest
import torch

from pflcore import metrics
from pflcore.cli import main
from pflcore.data import PARTITIONS, federation_of, partition

MNIST = np.repeat(np.arange(10), [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949])


def classes_of(part, i):
    return np.unique(MNIST[torch.cat([part.index["train"][i], part.index["test"][i]])])


def all_of(part):
    return torch.cat([r for lists in part.index.values() for r in lists])


@pytest.mark.parametrize("z", [2, 3])
def test_unimodal_deals_single_class_shards(z):
    part = partition("unimodal", MNIST, 100, z=z, seed=1)
    assert len(all_of(part)) == len(all_of(part).unique()) == 60_000  # everything, once
    assert all(1 <= len(classes_of(part, i)) <= z for i in range(100))
    sizes = torch.tensor([len(a) + len(b) for a, b in zip(*part.index.values(), strict=True)])
    if z == 2:  # 20 shards of each class
        assert int(sizes.min()) >= 542 and int(sizes.max()) <= 676
    tests = torch.tensor([len(t) for t in part.index["test"]])
    assert ((tests / sizes) - 0.2).abs().max() < 0.002
    held = np.isin(MNIST[part.index["test"][0]], classes_of(part, 0))
    assert held.all() and part.group is None
    again, other = (
        partition("unimodal", MNIST, 100, z=z, seed=seed).index["train"][3] for seed in (1, 2)
    )
    assert torch.equal(again, part.index["train"][3]) and not torch.equal(
        other, part.index["train"][3]
    )


def test_fewer_training_samples_leave_the_test_sets():
    whole, few = partition("unimodal", MNIST, 100), partition("unimodal", MNIST, 100, train=20)
    assert all(
        len(r) == 20 and torch.equal(r, w[:20])
        for r, w in zip(few.index["train"], whole.index["train"], strict=True)
    )
    assert all(
        torch.equal(a, b) for a, b in zip(few.index["test"], whole.index["test"], strict=True)
    )


def test_multimodal_is_two_populations_with_equal_shards():
    part = partition("multimodal", MNIST, 120, seed=3)
    assert part.group is not None and part.group.tolist() == [0] * 100 + [1] * 20
    sizes = {len(a) + len(b) for a, b in zip(*part.index.values(), strict=True)}
    assert sizes == {270}  # 135 a shard: 5421 // 40
    for i in range(120):
        assert (classes_of(part, i) % 2 == (1 if i < 100 else 0)).all()
    assert len(all_of(part).unique()) == 120 * 270
    assert part.facts == {"unused train samples": 27600}
    balanced = np.repeat(np.arange(10), 6000)
    fashion = partition("multimodal", balanced, 110, minority="fashion_mnist")
    assert {len(a) + len(b) for a, b in zip(*fashion.index.values(), strict=True)} == {332}
    few = np.unique(balanced[torch.cat(fashion.index["train"][90:])])
    assert few.tolist() == [0, 5, 6, 7, 9]
    cifar = partition("multimodal", np.repeat(np.arange(10), 5000), 110, minority="cifar10")
    assert {len(a) + len(b) for a, b in zip(*cifar.index.values(), strict=True)} == {332}


def test_a_federation_of_digits():
    data = federation_of("digits", "multimodal", 12, minority_clients=2)
    assert data.n == 12 and data.truth["group"].tolist() == [0] * 10 + [1] * 2
    assert {"unimodal", "multimodal"} <= set(PARTITIONS)


def test_subpopulations():
    values, group = [96, 97, 95, 98, 94, 70, 60], [0, 0, 0, 0, 0, 1, 1]
    got = metrics.subpopulations([float(v) for v in values], group)
    assert (got["majority"], got["minority"], got["gap"]) == (96, 65, 31)
    assert got["variance"] == pytest.approx(204.6938775510, rel=1e-9)
    assert metrics.mean([float(v) for v in values]) == pytest.approx(87.1428571429)
    assert metrics.subpopulations([1.0, float("nan"), 3.0], [0, 0, 1])["majority"] == 1


def test_info_counts_parameters(capsys):
    assert main(["info", "--model", "mlp", "--ranks", "120", "--no-bias"]) == 0
    said = capsys.readouterr().out
    assert (
        "158,800 parameters" in said
        and "120,200 parameters travel (0.757 of the model's), 360 stay with each client" in said
    )
    assert main(["info", "--model", "nothing"]) == 2


def test_attack_prints_its_table(tmp_path, capsys):
    small = (
        "--clients 2 --samples 20 --rounds 1 --epochs 1 --shadows 1 --ratios 2 --steps 5 --views "
        "all own --workers 1 --quiet"
    )
    asked = ["attack", "--data", "digits", "--out", str(tmp_path), *small.split()]
    assert main(asked) == 0
    said = capsys.readouterr().out
    cells = " ".join(said.split())
    assert cells.count("| fedavg | upload |") == 3
    assert cells.count("| factorized_waffle | own |") == 3
    assert {p.name for p in tmp_path.iterdir()} >= {
        "fedavg.json",
        "factorized_waffle.json",
        "table.md",
    }
    assert main(asked) == 0 and capsys.readouterr().out == said  # what was done is not done again
