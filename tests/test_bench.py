"""The bench's arithmetic and its table.

No test here measures a time.
"""

import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from entry_points import sentence

import bench
import pflcore
from bench import child, frameworks, problem, published, scale, small, table, workload
from bench.players import player

LIMITS = {"read": 10.0, "write": 5.0, "fma": 4.0, "sub_fma": 8.0}
MACHINE = table.Machine("a processor", 2, "plain", LIMITS, {"torch": "2"}, "today")
OPS = ("sqdist", "nearest", "aggregate", "weights", "robust", "rank1", "sgd", "chain")


def made(**changes):
    calls = {"pflcore": lambda: torch.ones(1), "torch": lambda: torch.ones(1)}
    return problem.Problem(
        **{
            "op": "op",
            "size": {"N": 1},
            "providers": calls,
            "error": lambda got: 0.0,
            **changes,
        }
    )


def test_a_benchmark_without_kernels_stops_unless_references_are_wanted(monkeypatch):
    without = pflcore.backend()._replace(kernels=False, why="they are not built")
    monkeypatch.setattr(bench, "backend", lambda: without)
    measured = []
    monkeypatch.setattr(bench, "_measure", lambda options: (measured.append(1), ""))
    with sentence("bench: expected kernels to time, got references, .*not built"):
        bench.run(bench.Options())
    assert not measured
    assert bench.run(bench.Options(references=True)) == 0 and measured


def test_a_child_process_has_the_parents_pflcore(tmp_path, monkeypatch):
    """It has, also in a folder whose pflcore Python would import first."""
    (tmp_path / "pflcore").mkdir()
    (tmp_path / "pflcore" / "__init__.py").write_text("raise SystemExit('hidden')")
    code = "import json, pflcore; print(json.dumps(pflcore.__file__))"
    (tmp_path / "shown.py").write_text(code)
    words = child.child_words("shown")
    words[1] += os.pathsep + str(tmp_path)
    done = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, capture_output=True, text=True
    )
    assert json.loads(done.stdout) == pflcore.__file__


@pytest.mark.deep("it takes seconds")
def test_the_problems_of_a_card_are_right_on_the_cpu(monkeypatch):
    from bench import card_rounds, gpu

    monkeypatch.setattr(gpu, "CARD", "cpu")
    small = [(op, {**k, "B": 2}) for op, k in gpu.LARGE if op == "rank1"]
    monkeypatch.setattr(gpu, "LARGE", small[:2])
    monkeypatch.setattr(
        gpu, "models", lambda n, p, seed: problem.models(n, 500, seed=seed)
    )
    for name in gpu.OPS:  # other tests try their own sizes
        monkeypatch.setattr(bench.suite(name), "sizes", lambda quick: [])
    small_rounds = [("lenet5", 2, 8), ("ResNet-18, quarter width", 2, 8)]
    monkeypatch.setattr(card_rounds, "SIZES", small_rounds)
    monkeypatch.setattr(card_rounds, "FULL_WIDTH", 16)
    for case in gpu.problems(False):
        for call in case.providers.values():
            with torch.enable_grad():
                assert (case.error(call()) or 0.0) < 1e-4, case.op


@pytest.mark.deep("together they take seconds", quick=4)
@pytest.mark.parametrize("name", OPS)
def test_every_provider_is_right(name):
    """Every provider gives the right result at a small size.

    Gram's float32 distances are an exception: the bench shows that they are wrong.
    """
    module = bench.suite(name)
    for size in itertools.islice(
        (s for s in module.sizes(True) if s.get("N", 10) <= 10), 6
    ):
        case = module.problem({**size, **({"P": 3001} if "P" in size else {})})
        assert case is not None
        assert next(iter(case.providers)) == "pflcore"
        for provider, call in case.providers.items():
            try:
                error = case.error(call())
            except ImportError:
                continue
            if not (
                provider == "Gram float32" or ("mm" in provider and name == "sqdist")
            ):
                others = provider.startswith(("torch", "scikit", "F.", "dense"))
                assert error < (1e-4 if others else 2e-6), (provider, size)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_sparse_product_of_a_card_is_right():
    from bench.aggregate import sparse_calls

    rows = problem.models(10, 3001)
    weight = torch.eye(10) + torch.eye(10).roll(1, 1)

    got = sparse_calls(weight, rows)["torch.sparse"]()

    torch.testing.assert_close(got, weight @ rows)


def test_limit_is_the_slower_of_memory_and_arithmetic():
    def limit(operations, machine=LIMITS, **more):
        return made(reads=20, writes=10, operations=operations, **more).limit(machine)

    assert (limit(4.0), limit(40.0), limit(40.0, mix="sub_fma")) == (4.0, 10.0, 5.0)
    assert limit(40.0, {}) is limit(0.0) is None


def test_rows_tell_errors_limits_losses_and_what_is_left_out(monkeypatch):
    seconds = iter([[2.0], [1.0], [2.5]])

    def timed(call, budget):
        result = call()
        return next(seconds), result

    monkeypatch.setattr(table, "timed", timed)
    calls = dict.fromkeys(("pflcore", "torch", "numpy", "slow"), lambda: torch.ones(1))
    calls["missing"] = problem.Absent("it is not installed.")
    case = made(
        providers=calls, reads=20, operations=4.0, error=lambda got: float(got[0]) * 0.5
    )
    rows = list(table.measure(case, LIMITS, 1.0, 2.0, {("op", "slow"): 1.0}))
    assert [(r.ms, r.slower, r.note) for r in rows] == [
        (2000, None, ""),
        (1000, 0.5, "faster than pflcore"),
        (2500, 1.25, ""),
        (None, None, "left out: about 4 s"),
        (None, None, "it is not installed."),
    ]
    ours = rows[0]
    assert (ours.error, ours.of_limit, ours.gb_per_s, ours.runs) == (0.5, 1.0, 1e-8, 1)


def command(tmp_path, capsys, words):
    """The output, the measurements and the table of a command.

    The last two are read from the files that the command writes.
    """
    pytest.importorskip("tyro")
    files = tmp_path / "bench.json", tmp_path / "bench.md"
    named = f"{words} --json {files[0]} --markdown {files[1]}"
    assert bench.main(named.split()) == 0
    return (
        capsys.readouterr().out,
        json.loads(files[0].read_text()),
        files[1].read_text(),
    )


def test_command_line_writes_json_and_markdown(tmp_path, capsys):
    output, measurements, text = command(
        tmp_path, capsys, "--quick --seconds 0.001 --op weights"
    )
    assert {"cpu", "threads", "versions", "date"} <= measurements["machine"].keys()
    limits = measurements["machine"]["limits"]
    assert limits.keys() == (LIMITS.keys() if pflcore.backend().kernels else set())
    assert all(v > 0 for v in limits.values())
    assert {r["provider"] for r in measurements["rows"]} == {
        "pflcore",
        "reference",
        "torch",
    }
    assert len(text.splitlines()) >= len(measurements["rows"]) + 4
    assert "weights" in output
    with sentence(".*existing folder"):
        bench.main(["--json", str(tmp_path / "none" / "x.json")])


def test_small_sizes_have_right_peers():
    for case in small.cases((2, 6), (65,)):
        result = case.problem.providers[case.provider]()
        assert case.problem.error(result) < 2e-6, case.op
        assert case.smallest.providers[case.provider]() is not None
        assert small.peers(case), case.op


def test_small_sizes_are_less_the_call_and_beside_the_best_peer(monkeypatch):
    case = next(small.cases((2,), (65,)))
    calls = dict.fromkeys(("torch.mm", "torch.other"), lambda: None)
    monkeypatch.setattr(small, "peers", lambda case: calls)
    seconds = [9e-6, 6e-6, 4e-6, 3e-6, 2e-6]  # whole, call, cdist, peers
    monkeypatch.setattr(small, "minima", lambda calls, budget: seconds)

    row = small.measure(case, 1.0)

    got = (row.call, row.of_cdist, row.kernel, row.torch, row.of_torch)
    assert got == pytest.approx((6.0, 1.5, 3.0, 2.0, 1.5))
    assert (row.op, row.n, row.p, row.peer) == ("one result", 2, 65, "torch.other")


def test_calls_of_a_small_size_take_turns():
    turns = []
    least = small.minima([lambda: turns.append("a"), lambda: turns.append("b")], 0.0)
    assert "".join(turns) == 3 * (3 * "a" + 3 * "b")
    assert len(least) == 2 and all(0 < seconds < 1 for seconds in least)


def test_command_line_measures_small_sizes(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(table.Machine, "measure", lambda *a: MACHINE)
    before = torch.get_num_threads()
    output, measurements, text = command(
        tmp_path, capsys, "--quick --seconds 0 --op small"
    )
    rows = measurements["rows"]
    assert len(rows) == 14
    assert all(row["peer"].startswith(("torch.", "F.")) for row in rows)
    for row in rows:
        assert f"| {row['peer']}" in output and f"| {row['peer']}" in text
    assert {row["threads"] for row in rows} == {1}
    assert torch.get_num_threads() == before


SMALL = dict(n=6, cohort=3, samples=60, tests=13, batch=4, rounds=2, data="made up")


@pytest.mark.long("workloads of published times")
@pytest.mark.parametrize("name", sorted(workload.WORKLOADS))
@pytest.mark.parametrize("evaluate", [False, True])
def test_workloads_of_published_times(name, evaluate):
    images = {"data": "cifar10"} if name == "blazefl-cnn" else {}
    w = replace(workload.WORKLOADS[name], **SMALL | images, evaluate=evaluate)
    data = workload.federation(w)
    assert sum(w.sizes) == 60 and data.n == 6 and data.size("test").sum() == 13
    case = published.problem(w)
    for provider, call in case.providers.items():
        try:
            seconds = call()
        except ImportError:
            assert provider not in ("pflcore", "plain loop")
            continue
        assert (
            isinstance(seconds, problem.Measured)
            and len(seconds) == 2
            and min(seconds) > 0
        )
    forward, step = published.flops(w)
    assert 2 * forward <= step <= 3 * forward
    assert case.operations == 30 * w.epochs * step + 13 * forward * evaluate
    assert ("made-up data" in published.title(w)) is (not workload.is_real(w.data))


def test_arithmetic_of_a_linear_model_and_sizes_by_a_power_law():
    w = replace(workload.WORKLOADS["flute-lr"], data="made up", n=50, samples=1000)
    assert published.flops(w) == (2 * 784 * 10, 4 * 784 * 10)
    sizes = w.sizes
    assert sum(sizes) == 1000 and min(sizes) >= 1 and max(sizes) == sizes[0]
    assert sizes[0] / sizes[-1] > 5
    assert set(replace(w, power=0.0).sizes) == {20}


def test_a_plain_round_is_fedavg(monkeypatch):
    """The plain loop's round is pflcore's FedAvg.

    With one batch a client, both have the same model after two rounds.
    """
    changes = SMALL | {"cohort": 6, "batch": 1000, "rounds": 1, "power": 1.0}
    w = replace(workload.WORKLOADS["flute-lr"], **changes)
    model = w.build()
    monkeypatch.setattr(workload.Workload, "build", lambda w: model)
    run = workload.simulation("fedavg", w)
    published.plain(w)
    trained = run.config.net.row(model)
    list(itertools.islice(run.iterate(), 2))
    assert not torch.equal(trained, run.config.net.w0)
    torch.testing.assert_close(run.state.server["x"], trained)


@pytest.mark.long("processes of others' rounds")
def test_command_line_plays_workloads(tmp_path, capsys, monkeypatch):
    small = {"flute-lr": replace(workload.WORKLOADS["flute-lr"], **SMALL)}
    monkeypatch.setattr(published, "WORKLOADS", small)
    monkeypatch.setattr(table.Machine, "measure", lambda *a: MACHINE)
    output, measurements, text = command(
        tmp_path, capsys, "--workload flute-lr --rounds 1"
    )
    assert "medians of 1 rounds" in output and "18.1 s (1.0, CPU)" in output
    assert output.count("FLUTE") == 2 == text.count("FLUTE")
    played = [
        r for r in measurements["rows"] if r["provider"] in ("pflcore", "plain loop")
    ]
    assert [r["size"]["evaluate"] for r in played] == [False, False, True, True]
    assert all(r["ms"] > 0 and r["of_limit"] > 0 and r["runs"] == 1 for r in played)


def one_batch_task():
    """Rounds of clients that each take one step, so that no shuffle plays a part."""
    w = frameworks.workload({"model": "mlp", "N": 3, "images": 10}, 2)
    w = replace(w, data="made up", batch=1000, power=1.0, tests=6)
    train, test = workload.splits(w).values()
    x, y = workload.pool(w.data, w.samples, w.tests)
    training = (w.lr, w.batch, w.epochs, w.rounds, w.cohort, True)
    return player.Task(x, y, train, test, w.build(), *training)


def test_players_without_frameworks_agree(monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    task = one_batch_task()
    start = task.model[-1].weight.clone()
    clocks = [player.Clock(task.rounds) for _ in range(2)]

    got = player.play_pflcore(task, clocks[0], None)
    want = player.play_plain_loop(task, clocks[1], None)

    assert not torch.equal(want[-1].weight, start)
    for a, b in zip(got.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    assert [len(clock.ends) for clock in clocks] == [2, 2]
    assert all(len(clock.cpu) == 2 and clock.megabytes >= 0 for clock in clocks)


def test_missing_checkout_is_a_sentence():
    w = frameworks.workload({"model": "mlp", "N": 2, "images": 2}, 2)

    with pytest.raises(ImportError, match="give a checkout by --pfllib"):
        frameworks.play("PFLlib", w)


def test_programs_take_turns_and_times_are_their_least(monkeypatch):
    size = {"model": "mlp", "N": 2, "images": 2}
    played = []

    def play(program, w, evaluate, checkout):
        played.append((program, evaluate))
        if program == "missing":
            raise problem.Absent("not measured: it is not installed")
        scale = {"pflcore": 1.0, "other": 4.0}[program]
        turn = len(played)
        seconds = [scale * turn, 9.0]
        facts = {"start": turn, "seconds": seconds, "cpu": [1.0, 1.0 + 5 * turn]}
        return {**facts, "megabytes": 100.0, "accuracy": 0.5}

    monkeypatch.setattr(frameworks, "PLAYERS", ("pflcore", "missing", "other"))
    monkeypatch.setattr(frameworks, "TURNS", 2)
    monkeypatch.setattr(frameworks, "play", play)

    ours, missing, other = frameworks.measure(size, {}, quick=False)

    turn = [(name, e) for e in (False, True) for name in ("pflcore", "other")]
    assert [pair for pair in played if pair[0] != "missing"] == 2 * turn
    assert (ours["start"], ours["round"], ours["cpu"]) == (1, 1.0, 1.0)
    assert (other["round"], other["evaluated_round"]) == (9.0, 9.0)
    cells = frameworks.cells(other, ours)
    assert cells[:4] == ["mlp N=2 images=2", "other", "3.0 (3.0)", "9.000 (9.0)"]
    assert frameworks.cells(missing, ours)[2:-1] == [""] * 7
    assert missing["note"] == "not measured: it is not installed"


@pytest.mark.long("processes of others' rounds")
def test_command_line_plays_frameworks(tmp_path, capsys, monkeypatch):
    small = [{"model": "mlp", "N": 2, "images": 20}]
    monkeypatch.setattr(frameworks, "sizes", lambda quick: small)
    monkeypatch.setattr(frameworks, "PLAYERS", ("plain loop", "FL-bench", "none"))
    monkeypatch.setattr(table.Machine, "measure", lambda *a: MACHINE)

    output, rows, text = command(tmp_path, capsys, "--quick --op frameworks")

    assert [row["program"] for row in rows] == ["plain loop", "FL-bench", "none"]
    assert rows[0]["round"] > 0 and 0 <= rows[0]["accuracy"] <= 1
    assert len(rows[0]["runs"][0]["seconds"]) == 2
    assert "give a checkout by --flbench" in output and "it failed" in text


def test_how_numbers_grow_with_the_clients():
    rows = [
        {"n": n, "least": 3.0, "rss": 2.0 * n, "bytes": n**0.5}
        for n in (100, 1000, 10_000)
    ]
    growth = "time as N^0.00, memory as N^1.00, record as N^0.50"
    assert scale.growth(rows).replace("-0.00", "0.00") == growth
    assert scale.growth(rows[:1]) == "too few sizes to say"
    one = scale.one("hypcluster", 120, 0.01)
    assert one["least"] > 0 and 0 < one["bytes"] < 10_000


def test_a_gram_matrix_loses_what_models_after_a_round_differ_by():
    """A Gram matrix finds wrong neighbours of close models.

    For distant rows it agrees with exact distances. For rows 1e-4 apart on a common
    offset it chooses other neighbours.
    """
    from bench import neighbours

    far = torch.randn(8, 500)
    near = 1.0 + 1e-4 * torch.randn(8, 500)
    for rows, same in ((far, True), (near, False)):
        exact = neighbours.Asked(k=3)
        by_gram = neighbours.Asked(k=3, by_gram=True)
        weight, index = exact.mixing_weights(rows, rows)
        other, where = by_gram.mixing_weights(rows, rows)
        assert exact.seen == by_gram.seen and len(exact.seen) == 1
        assert (exact.seen[0][0] == 0) == same and torch.equal(index, where) == same
        assert torch.equal(weight, other) == same or same
