"""Attacks follow their papers, and defences follow their formulas.

An algorithm that cannot take a defence refuses it with one sentence.
"""

from dataclasses import replace

import pytest
import torch
from entry_points import sentence, synthetic_linear
from parts.attacks import BAD, DATA, run
from places import tabled
from small import equals, images, layers, swept, tiny_model
from torch import nn

from pflcore import ALGORITHMS, Adversary, FedAvg
from pflcore.algorithms import Algorithm, Waffle
from pflcore.robust import (
    Bulyan,
    ClipToMedian,
    FLTrust,
    Krum,
    Median,
    MultiKrum,
    NearestNeighborMixing,
)
from pflcore.simulation.record import read


# attacks --------------------------------------------------------------------
def test_flipped_labels_are_the_bad_ones_alone():
    permuted = images()  # its clients permute their labels already
    for fed, model, bad in (
        (DATA, lambda: nn.Linear(8, 4), BAD),
        (permuted, tiny_model(), [1]),
    ):
        poisoned = run(
            data=fed, model=model, adversary=Adversary("label_flip", bad)
        ).config.data
        for i in range(fed.n):
            want = 3 - fed.labels(i) if i in bad else fed.labels(i)
            equals(poisoned.labels(i), want)


@pytest.mark.parametrize(
    "name",
    swept(set(ALGORITHMS) - {"local"}, ("fedavg", "scaffold", "factorized_waffle")),
)
def test_every_algorithm_can_be_attacked(name):
    adversary = Adversary("scale", BAD, 1e4)
    history = run(name, rounds=1, model=tiny_model(8), adversary=adversary).run()
    norms = history.rounds[0]["relative_update_norm"]
    assert min(norms[8:]) > 100 > max(norms[:8]), norms


def test_another_attack_has_its_own_strength():
    before = Adversary("sign_flip", BAD)
    for name in ("noise", "label_flip"):
        after = replace(before, attack=name)
        assert after == Adversary(name, BAD) and after.factor != before.factor
    header = run(adversary=before).header()
    assert header["adversary"]["strength"] == 1


# Each line: options of the adversary, options of the algorithm, and the error.
NOT = """\
{"clients": [10]} | {} | adversary: expected ids of clients from 0 to 9, each once
{"clients": [1, 1]} | {} | adversary: expected ids of clients from 0 to 9, each once
{"clients": []} | {} | adversary: expected ids of clients from 0 to 9, each once
{"clients": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]} | {} | adversary: expected at least one honest client
{"attack": "label_flip", "strength": 2.0} | {} | strength: expected None, as labels are
{} | {"mean": "fltrust"} | mean: expected fltrust with trusted_client
{} | {"mean": "fltrust:10"} | trusted_client: expected a client from 0 to 9
"""  # noqa: E501


@pytest.mark.parametrize("adversary, method, words", tabled(NOT))
def test_what_cannot_be_is_one_sentence(adversary, method, words):
    with sentence(words):
        bad = Adversary(**{"attack": "sign_flip", "clients": BAD, **adversary})
        run(FedAvg(**method), adversary=bad)


def test_numbers_have_no_labels_to_flip():
    numbers = synthetic_linear(n=3, dim=2)
    with sentence(
        "adversary: expected an attack on numbers as targets, got 'label_flip'"
    ):
        run(
            data=numbers,
            model=lambda: nn.Linear(2, 1),
            adversary=Adversary("label_flip", [1]),
        )


def test_a_trusted_client_joins_every_round_beside_those_who_may_take_part():
    assert not FedAvg().traits.required_clients
    method = FedAvg(mean=FLTrust(0))
    whole = run(method, participation=0.3, rounds=3)
    assert (
        all(0 in r["cohort"] for r in whole.run().rounds)
        and whole.header()["target"] is None
    )
    history = run(method, clients=[1, 2, 3, 4], participation=0.5, rounds=8).run()
    cohorts = [r["cohort"] for r in history.rounds]
    assert all(len(c) == 3 for c in cohorts) and set.intersection(
        *map(set, cohorts)
    ) == {0}
    assert set().union(*cohorts) == {0, 1, 2, 3, 4}


def test_who_does():
    """Algorithms that average updates take a robust mean, and no others have one."""
    defended = "fedavg fedadam fedprox ditto mrmtl finetune per_fedavg scaffold"
    for name in defended.split():
        ALGORITHMS[name](mean=Median())
    others = [
        "waffle",
        "feddwa",
        "fedamp",
        "hypcluster",
        "ensemble",
        "local",
        "qfedavg",
    ]
    derived = [type("Own", (base,), {}) for base in (Algorithm, Waffle)]
    for kind in (*map(ALGORITHMS.get, others), *derived):
        with pytest.raises(TypeError, match="unexpected keyword argument 'mean'"):
            kind(mean=Median())


@pytest.mark.parametrize(
    "mean, needed",
    [
        (Krum(2), 7),
        (MultiKrum(2), 7),
        (Bulyan(2), 11),
        (NearestNeighborMixing(3, ClipToMedian()), 7),
    ],
)
def test_a_mean_for_which_no_round_is_large_enough_is_refused(mean, needed):
    """Clients that are absent do not lower the number of hostile clients."""
    with sentence(
        f"mean: expected one for rounds of 5 clients or fewer, got {mean}, which needs "
        f"{needed}; lower num_byzantine, or raise participation."
    ):
        run(FedAvg(mean=mean), participation=0.5)
    if needed <= 10:  # a round of all 10 clients, of which Poisson's may consist
        run(FedAvg(mean=mean))
        run(FedAvg(mean=mean), participation=0.5, sampling="poisson")


def test_the_target_is_no_attacker():
    words = "adversary: expected clients other than the target"
    with sentence(words):
        run(Waffle(target=BAD[0]), adversary=Adversary("scale", BAD))
    run(Waffle(target=0), adversary=Adversary("scale", BAD))


def test_running_statistics_are_no_way_around_a_defence():
    model = layers("Linear 8 5, BatchNorm1d 5, Linear 5 4")
    with sentence("batch_norm: this FedAvg knows 'local' statistics, got 'average'"):
        run(FedAvg(mean=Median()), model=model, batch_norm="average")
    simulation = run(FedAvg(mean=Median()), model=model, rounds=2)
    simulation.run()
    assert not torch.equal(simulation.state.buffers[0], simulation.state.buffers[1])


# the command line -----------------------------------------------------------
@pytest.mark.deep("it takes a second")
def test_the_command_line_poisons_and_defends(tmp_path, capsys):
    pytest.importorskip("tyro")
    from pflcore.lab.cli import main

    options = (
        "--attack inner_product --attack-clients 1 2 --attack-strength 5 --mean "
        "trimmed_mean:2"
    )
    words = (
        f"run fedavg --data synthetic_clusters --rounds 2 --quiet {options} --out "
        f"{tmp_path}"
    )
    assert main(words.split()) == 0
    head = read(tmp_path)[0].header
    assert head["adversary"] == {
        "attack": "inner_product",
        "clients": [1, 2],
        "strength": 5.0,
    }
    assert head["options"]["mean"] == "trimmed_mean:num_byzantine=2"
    assert "inner_product by clients 1, 2" in capsys.readouterr().out
