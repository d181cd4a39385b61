"""A last batch of one sample, numbers of numpy, steps that no mask leaves out, and what messages
advise."""

import json

import numpy as np
import pytest
import torch
from small import grouped, images, make_setting, tiny_model, with_test
from torch import nn

import pflcore
from pflcore import Adversary, Clients, Federation, Net, Simulation, Training
from pflcore.data import federation_of


def normed():
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))


def federation(sizes=(5, 5, 5), **options):
    gen = torch.Generator().manual_seed(1)
    parts = [
        (torch.randn(n, 6, generator=gen), torch.randint(0, 4, (n,), generator=gen)) for n in sizes
    ]
    return Federation.from_clients(with_test(parts, parts), classes=4, **options)


def losses(model=normed, data=None, training=None, **options):
    run = Simulation(
        "local", model, data or federation(), training or Training(), rounds=2, **grouped(options)
    ).run()
    return run.series("loss")[1][-1]


# batch norm -----------------------------------------------------------------
@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_a_last_batch_of_one_joins_the_one_before_for_batch_norm(engine):
    """Of five samples four and one are one batch of five."""
    assert torch.equal(
        *(losses(training=Training(batch_size=b, epochs=2), engine=engine) for b in (4, 5))
    )
    sizes = federation((9, 8, 13))
    assert losses(data=sizes, training=Training(batch_size=4), engine=engine).isfinite().all()


def test_torchs_way_is_an_option_and_stays_that_of_other_models():
    with pytest.raises(
        ValueError, match=r"^data: client 0 \(5 samples, batch_size 4\) has a batch of one sample"
    ):
        losses(training=Training(batch_size=4, join_last=False))
    with pytest.raises(ValueError, match=r"^data: client 1 \(1 samples, batch_size 4\)"):
        losses(data=federation((5, 1, 5)), training=Training(batch_size=4))
    plain = [
        losses(lambda: nn.Linear(6, 4), training=Training(batch_size=4, join_last=join))
        for join in (True, False)
    ]
    assert torch.equal(*plain) and not torch.equal(
        plain[0], losses(lambda: nn.Linear(6, 4), training=Training(batch_size=5))
    )


def test_a_newcomers_last_sample_joins_too():
    history = Simulation(
        "ditto", normed, federation((8, 8)), Training(batch_size=4), rounds=1
    ).run()
    x, y = torch.randn(5, 6), torch.arange(5) % 4
    assert history.adapt((x, y))(x).isfinite().all()
    with pytest.raises(
        ValueError,
        match=r"^samples: client 2 \(1 samples, batch_size 4\) has a batch of one sample",
    ):
        history.adapt((x[:1], y[:1]))


# numbers --------------------------------------------------------------------
def test_numpys_numbers_are_numbers(tmp_path):
    training = Training(
        lr=np.float32(0.5),
        batch_size=np.int64(4),
        epochs=np.int64(1),
        schedule=lambda r, n: np.float32(1),
    )
    options = {
        "clip": np.float32(1),
        "evaluated": np.int64(2),
        "seed": np.int64(3),
        "participation": np.float64(0.5),
    }
    run = Simulation(
        pflcore.FedAvg(server_lr=np.float32(0.5)),
        normed,
        federation(),
        training,
        rounds=np.int64(1),
        **grouped(options),
    )
    json.dumps(run.run().header)
    run.save(tmp_path)
    again = Simulation.load(tmp_path, model=normed, data=federation(), training=training)
    assert again.state.round == 1
    assert pflcore.Server(pflcore.FedAvg(), nn.Linear(2, 2), 2).join(np.int64(1)) == 1


@pytest.mark.parametrize("kind", [np.array, torch.tensor, set, tuple])
def test_clients_in_any_collection(kind):
    assert Adversary("sign_flip", kind([1, 2])).clients == (1, 2)
    assert Simulation("fedavg", normed, federation(), clients=kind([0, 2])).clients.tolist() == [
        0,
        2,
    ]


def test_labels_that_are_left_out_need_no_mask():
    gen = torch.Generator().manual_seed(0)
    x, y = torch.randn(12, 3, generator=gen), torch.randint(0, 2, (12, 5), generator=gen)
    mask = torch.rand(12, 5, generator=gen) > 0.3

    class Steps(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 10)

        def forward(self, x):
            return self.layer(x["x"] if isinstance(x, dict) else x).view(-1, 2, 5)

    def last(x, y):
        return losses(
            Steps, Federation.from_clients(with_test([(x, y)] * 2, [(x, y)] * 2), classes=2)
        )

    torch.testing.assert_close(last(x, y.masked_fill(~mask, -100)), last({"x": x, "mask": mask}, y))


# another run ----------------------------------------------------------------
@pytest.mark.parametrize(
    ("first", "then", "what"),
    [
        (
            {"model": nn.Sequential(nn.Linear(6, 4), nn.ReLU())},
            {"model": nn.Sequential(nn.Linear(6, 4), nn.Tanh())},
            "1 is 'ReLU\\(\\)' there",
        ),
        (
            {"loss": nn.CrossEntropyLoss(weight=torch.ones(4))},
            {"loss": nn.CrossEntropyLoss(weight=torch.ones(4) * 2)},
            "digest of the loss",
        ),
        (
            {"loss": nn.CrossEntropyLoss(label_smoothing=0.1)},
            {"loss": nn.CrossEntropyLoss(label_smoothing=0.5)},
            "digest of",
        ),
    ],
)
def test_another_model_or_loss_does_not_go_on(tmp_path, first, then, what):
    first, then = ({"model": nn.Linear(6, 4), **given} for given in (first, then))
    run = Simulation("fedavg", data=federation(), rounds=2, **first)
    next(run.iterate())
    run.save(tmp_path)
    assert Simulation.load(tmp_path, data=federation(), **first).state.round == 1
    with pytest.raises(ValueError, match=f"that of another run: {what}"):
        Simulation.load(tmp_path, data=federation(), **then)


def test_a_loss_that_holds_a_function_goes_on(tmp_path):
    """Its address is another in every process."""

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.weigh = lambda v: 2 * v

        def forward(self, scores, y):
            return self.weigh(nn.functional.cross_entropy(scores, y))

    one, other = Own(), Own()  # both at once, so that they lie at two places
    Simulation("fedavg", nn.Linear(6, 4), federation(), rounds=2, loss=one).save(tmp_path)
    assert (
        Simulation.load(tmp_path, model=nn.Linear(6, 4), data=federation(), loss=other).state.round
        == 0
    )


# data -----------------------------------------------------------------------
def test_leafs_labels_in_a_column_of_signs(tmp_path):
    users = {u: {"x": [[1.0, 2.0], [3.0, 4.0]], "y": [[-1], [1]]} for u in "ab"}
    (tmp_path / "all.json").write_text(
        json.dumps({"users": ["a", "b"], "num_samples": [2, 2], "user_data": users})
    )
    fed = federation_of(f"leaf:{tmp_path / 'all.json'}", fractions={})
    assert fed.y.tolist() == [0, 1, 0, 1] and fed.classes == 2


def test_a_table_in_pandas_order_trains_as_any_other():
    x = torch.randn(4, 40).T  # columns lie apart
    data = Federation.from_table(x, torch.arange(40) % 2, torch.arange(40) % 4)
    assert data.x.is_contiguous() and torch.equal(data.x, x)


# sentences ------------------------------------------------------------------
def test_what_messages_advise():
    x, y = torch.randn(8, 6), torch.arange(8) % 4
    for call, said in (
        (
            lambda: Federation.from_clients([(np.array([["a", "b"]] * 8), y)]),
            "turn images and words into numbers",
        ),
        (lambda: pflcore.ops.pairwise_sqdist([torch.ones(3)]), "torch.stack"),
        (
            lambda: Simulation("fedavg", normed, Federation.from_clients([(x, y)] * 2)),
            r"split\(test=0\.2\)",
        ),
        (
            lambda: Simulation(
                "fedavg", normed, Federation.from_clients([(x, y + 1)] * 2).split(test=0.5)
            ),
            "count them from 0",
        ),
        (
            lambda: Simulation(
                "fedavg", normed, Federation.from_clients([(x, y[:, None])] * 2).split(test=0.5)
            ),
            r"make labels of one",
        ),
        (
            lambda: (
                Simulation("fedavg", normed, federation(), rounds=1)
                .run()
                .predict(0, torch.randn(3, 7))
            ),
            r"^x: expected samples \[B",
        ),
        (lambda: Simulation("FedDAW", normed, federation()), "did you mean 'feddwa'"),
    ):
        with pytest.raises((ValueError, TypeError), match=said):
            call()


def test_algorithms_in_any_spelling():
    assert Simulation("FedDWA", normed, federation()).name == "feddwa"
    assert Simulation("LG-FedAvg", normed, federation()).name == "lg_fedavg"


def test_exports_are_as_readable_as_their_folder(tmp_path):
    pytest.importorskip("safetensors")
    history = Simulation("fedavg", normed, federation(), rounds=1).run()
    (tmp_path / "out").mkdir(mode=0o755)
    history.export(tmp_path / "out")
    assert {p.stat().st_mode & 0o777 for p in (tmp_path / "out").glob("*.safetensors")} == {0o644}


def test_data_sets_as_they_come():
    full = torch.utils.data.TensorDataset(torch.randn(4, 2), torch.arange(4) % 2)
    assert Federation.from_clients([{"train": full, "test": full}] * 2).size("test").tolist() == [
        4,
        4,
    ]
    assert Federation.from_clients(
        with_test([full] * 2, [full, torch.utils.data.Subset(full, [])])
    ).size("test").tolist() == [4, 0]
    for call, said in (
        (
            lambda: Federation.from_clients({"alice": (torch.ones(2, 2), torch.ones(2))}),
            "of a dict give its values",
        ),
        (lambda: Federation.from_clients([[{"x": 1, "y": 2}]]), "a Dataset of pairs"),
        (lambda: pflcore.pack([{1: torch.ones(2)}]), "got the key 1"),
        (
            lambda: Simulation("fedavg", torch.compile(nn.Linear(6, 4)), federation()),
            "give its _orig_mod",
        ),
        (
            lambda: Simulation("fedavg", torch.jit.script(nn.Linear(6, 4)), federation()),
            "scripted or traced",
        ),
    ):
        with pytest.raises((TypeError, ValueError), match=said):
            call()


def test_a_model_whose_net_was_made_by_a_lambda_is_kept(tmp_path):
    for name in ("fedavg", "apfl", "knnper", "fedrod"):
        model = Simulation(name, lambda: nn.Linear(6, 4), federation(), rounds=1).run().model(0)
        torch.save(model, tmp_path / "model.pt")
        again = torch.load(tmp_path / "model.pt", weights_only=False)
        assert torch.equal(again(torch.ones(2, 6)), model(torch.ones(2, 6)))


@pytest.mark.parametrize("wrong", [{"user_data": []}, {"users": 3}])
def test_a_leaf_file_that_is_none_is_a_sentence(tmp_path, wrong):
    right = {"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": [[1.0]], "y": [1]}}}
    (tmp_path / "all.json").write_text(json.dumps(right | wrong))
    with pytest.raises(OSError, match=r"all\.json: expected LEAF"):
        federation_of(f"leaf:{tmp_path / 'all.json'}")


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_shuffles_of_several_batches_a_step_do_not_depend_on_who_is_there(engine):
    s = make_setting(
        Net(tiny_model()), images((5, 12, 31)), Training(lr=0.1, batch_size=4), engine=engine
    )

    def update(rows, grad, k):
        return {"w": rows["w"] - 0.1 * (grad(rows["w"]) + 2 * grad(rows["w"], 1))}

    def moved(ids):
        local = Clients(s, torch.tensor(ids), 1, torch.empty(len(ids), 0))
        return local.each_batch(
            {"w": s.net.w0.expand(len(ids), -1)}, update, steps=7, batches=2
        ).rows["w"]

    torch.testing.assert_close(
        moved([0, 1, 2]), torch.cat([moved([i]) for i in range(3)]), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("engine", ["chain", "loop", "vmap"])
def test_several_minibatches_a_step_do_not_depend_on_the_company(engine):
    data = images()
    s = make_setting(Net(tiny_model()), data, Training(lr=0.1, batch_size=4), 2, engine)

    def played(ids):
        local = Clients(s, torch.tensor(ids), 1, s.net.b0.expand(len(ids), -1))
        start = {"w": s.net.w0.expand(len(ids), -1)}
        return local.each_batch(
            start,
            lambda r, grad, k: {"w": r["w"] - 0.1 * grad(r["w"]) - 0.2 * grad(r["w"], 1)},
            batches=2,
            steps=5,
        ).rows["w"]

    together = played([0, 1, 2])
    for i in range(3):
        torch.testing.assert_close(together[i], played([i])[0], rtol=1e-5, atol=1e-6)
