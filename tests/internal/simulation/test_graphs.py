"""Tests of CUDA graphs of local steps, on the pretended GPU.

Graphs change no bit of a run. What a graph cannot hold is refused.
"""

import contextlib

import pretend_graph
import pytest
import torch
from entry_points import held_out
from hypothesis import given
from hypothesis import strategies as st
from parts.user import simulation
from pretend_gpu import Pretend, pretended_gpu
from small import images, layers, tiny_model, without_twins
from torch import nn

from pflcore import Training
from pflcore.nn import Dropout
from pflcore.train import _graphs, _probe
from pflcore.train._engines import Chunk

# There is one case for each kind of step.
DIFFERENT = ("fedavg", "scaffold", "apfl", "fedrod", "perfedavg")


def convolved():
    return layers(
        "Conv2d 1 3 3 1 1, BatchNorm2d 3, ReLU, MaxPool2d 2, Flatten, Linear 12 4"
    )


def dropped():
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), Dropout(0.5), nn.Linear(5, 4))


def scaled(scale):
    """A model whose forward pass multiplies by the value of `scale(x)`."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers("Linear 6 5, Tanh, Linear 5 4")

        def forward(self, x):
            return self.layers(x * scale(x))

    return Scaled


def copied_from_host(x):
    return torch.tensor([2.0]).to(x.device)


@pytest.fixture
def gpu(monkeypatch):
    """The pretended GPU, which captures the second step of a shape."""
    monkeypatch.setattr(_graphs, "CAPTURE_AFTER_STEPS", 1)
    with pretended_gpu() as device:
        yield str(device)


def play(algorithm, model, device, sizes=(6, 9, 7), **options):
    shape = (1, 4, 4) if model is convolved else (6,)
    options = {"training": Training(0.05, batch_size=5, epochs=2), **options}
    data = held_out(images(sizes, shape))
    run = simulation(
        algorithm,
        data,
        model=model,
        rounds=2,
        device=device,
        **options,
    )
    run.run()
    assert run.history.stopped is None
    return run


def tensors_of(run):
    state = run.history.state
    found = {f"server {k}": v for k, v in state.server.items()} | state.clients
    return {k: v.real_ if isinstance(v, Pretend) else v for k, v in found.items()}


def assert_same_state(got, want):
    got, want = tensors_of(got), tensors_of(want)
    assert got.keys() == want.keys()
    for name in got:
        assert torch.equal(got[name], want[name]), name


def path(run):
    return run.header()["path"]


SLOW = pytest.mark.deep("a pretended GPU is slow")
MORE_STEPS = [(name, tiny_model()) for name in DIFFERENT if name != "fedavg"]
MORE_STEPS += [("fedrod", convolved), ("fedavg", dropped), ("apfl", dropped)]


@pytest.mark.deep("it takes seconds")
@pytest.mark.parametrize(
    "algorithm, model",
    [
        ("fedavg", convolved),
        *(pytest.param(*step, marks=SLOW) for step in MORE_STEPS),
    ],
)
def test_graphs_change_no_bit(gpu, algorithm, model):
    got = play(algorithm, model, gpu)
    want = play(algorithm, model, gpu, graphs=False)

    assert got.config.graphs.replays > 0
    assert path(got)["graphs"] == "captured"
    assert path(want)["graphs"] == "eager: asked for"
    assert_same_state(got, want)


@SLOW
def test_augmentation_draws_anew_in_every_replay(gpu):
    """The samples are inputs of a graph."""
    options = {"training": Training(0.05, 5, 2, augment=("flip", "crop:1"))}
    got = play("fedavg", convolved, gpu, **options)
    want = play("fedavg", convolved, gpu, graphs=False, **options)

    assert got.config.graphs.replays > 0
    assert_same_state(got, want)


@pytest.mark.long("all ways to train on a pretended GPU, which is slow")
@pytest.mark.parametrize("algorithm", without_twins("train"))
def test_graphs_of_every_way_to_train_change_no_bit(gpu, algorithm):
    got = play(algorithm, tiny_model(), gpu)
    want = play(algorithm, tiny_model(), gpu, graphs=False)

    assert_same_state(got, want)


@SLOW
@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_graphs_of_an_engine_change_no_bit(gpu, engine):
    got = play("fedavg", dropped, gpu, engine=engine)
    want = play("fedavg", dropped, gpu, engine=engine, graphs=False)

    assert got.config.graphs.replays > 0
    assert_same_state(got, want)


@pytest.mark.deep("it takes a second")
def test_dropout_draws_anew_in_every_replay(gpu):
    """Random seeds are inputs of a graph.

    Two replays with the same weights and samples draw other numbers.
    """
    run = play("fedavg", dropped, gpu)
    graph = next(iter(run.config.graphs._graphs.values()))

    graph.replay()
    before = graph.outputs["losses"].real_.clone()
    graph.inputs["seeds"].add_(1)
    graph.replay()

    assert not torch.equal(graph.outputs["losses"].real_, before)


@pytest.mark.deep("it takes seconds")
def test_a_frozen_random_number_is_found_before_round_1(gpu, monkeypatch):
    """The probe fails if a seed is no input of the graph.

    The step then gives other numbers than the module.
    """
    recordable = Chunk._recordable_step

    def frozen(self, step, w, which):
        key, body, inputs = recordable(self, step, w, which)
        seeds = inputs.pop("seeds")
        return key, lambda rest: body({**rest, "seeds": seeds}), inputs

    monkeypatch.setattr(Chunk, "_recordable_step", frozen)
    run = play("fedavg", dropped, gpu)

    assert path(run)["graphs"].startswith("eager: captured, its loss in training mode")
    assert run.config.graphs.replays == 0


@SLOW
def test_frozen_weights_of_one_probe_client_are_found(gpu, monkeypatch):
    """The first replay of a probe with one client has other weights.

    The probe of a large model has one client.
    """
    recordable = Chunk._recordable_step

    def frozen(self, step, w, which):
        key, body, inputs = recordable(self, step, w, which)
        weights = inputs.pop("w").clone()
        return key, lambda rest: body({**rest, "w": weights}), inputs

    monkeypatch.setattr(_probe, "FULL_PROBE_MAX_WEIGHTS", 0)
    monkeypatch.setattr(Chunk, "_recordable_step", frozen)
    run = play("fedavg", tiny_model(), gpu, engine="vmap")

    assert path(run)["graphs"].startswith("eager: captured, its ")


@SLOW
def test_a_model_that_copies_from_the_host_is_trained_without_graphs(gpu):
    run = play("fedavg", scaled(copied_from_host), gpu)
    want = play("fedavg", scaled(lambda x: 2.0), gpu, graphs=False)

    assert run.header()["engine"] == "vmap"
    assert path(run)["graphs"].startswith(
        "eager: a step makes the host wait for the GPU"
    )
    assert_same_state(run, want)


@pytest.mark.deep("it takes seconds")
def test_a_capture_that_fails_in_a_round_goes_on_without_graphs(gpu, monkeypatch):
    @contextlib.contextmanager
    def failing(graph, **_):
        yield
        raise torch.OutOfMemoryError("CUDA out of memory.")

    data = held_out(images((6, 9, 7), (6,)))
    training = Training(0.05, batch_size=5, epochs=2)
    run = simulation("fedavg", data, training=training, rounds=2, device=gpu)
    monkeypatch.setattr(torch.cuda, "graph", failing)
    with pytest.warns(RuntimeWarning, match="could not be captured as a CUDA graph"):
        run.run()

    assert path(run)["graphs"] == "eager: CUDA out of memory"
    assert_same_state(run, play("fedavg", tiny_model(), gpu, graphs=False))


def test_a_cpu_has_no_graphs():
    run = play("fedavg", tiny_model(), "cpu")

    assert run.config.graphs is None
    assert "graphs" not in path(run)


@SLOW
@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_clients_of_other_sizes_keep_their_graphs(gpu, engine):
    """The last client's later steps have other shapes, of larger and smaller inputs."""
    sizes = (9, 7, 8, 23)
    got = play("fedavg", tiny_model(), gpu, sizes, engine=engine)
    want = play("fedavg", tiny_model(), gpu, sizes, engine=engine, graphs=False)

    assert path(got)["graphs"] == "captured"
    assert got.history.rounds[-1]["replayed"] == got.config.graphs.replays > 0
    assert_same_state(got, want)


@SLOW
def test_a_run_without_replays_does_not_say_captured(gpu, monkeypatch):
    monkeypatch.setattr(_graphs, "CAPTURE_AFTER_STEPS", 99)
    run = play("fedavg", tiny_model(), gpu)

    assert path(run)["graphs"].startswith("eager so far: ")
    assert [record["replayed"] for record in run.history.rounds] == [0, 0]


# the graphs themselves --------------------------------------------------------


def double(inputs):
    return {"twice": inputs["x"] * 2}


@pytest.fixture
def graphs(gpu):
    return _graphs.GradientGraphs(torch.device(gpu), capture_after_steps=0)


def on_gpu(*values):
    return {"x": torch.tensor(values).to("cuda:0")}


def memory_of(graphs):
    """Sizes in bytes of the pieces that hold the graphs' inputs, by address."""
    views = [v for g in graphs._graphs.values() for v in g.inputs.values()]
    pieces = [v.real_.untyped_storage() for v in views]
    return {piece.data_ptr(): piece.nbytes() for piece in pieces}


def test_a_larger_shape_leaves_the_smaller_ones_graph(graphs):
    small = on_gpu(1.0)
    large = on_gpu(1.0, 2.0)
    for inputs in (small, large):
        graphs.run("double", double, inputs)

    assert graphs.run("double", double, small)["twice"].tolist() == [2.0]
    assert graphs.run("double", double, large)["twice"].tolist() == [2.0, 4.0]
    assert graphs.replays == 2
    assert graphs.refusal_reason is None


def test_a_later_larger_step_takes_no_new_memory(graphs):
    large = on_gpu(1.0, 2.0, 3.0)
    graphs.reserve(3)
    for inputs in (on_gpu(1.0), large, large):
        got = graphs.run("double", double, inputs)

    assert got["twice"].tolist() == [2.0, 4.0, 6.0]
    assert len(memory_of(graphs)) == 1


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_shapes_in_any_order_are_captured_once(lengths):
    """The results are those of the function, and fixed memory stays small."""
    with pretended_gpu() as device:
        graphs = _graphs.GradientGraphs(torch.device(device), capture_after_steps=0)
        for length in lengths:
            x = torch.arange(float(length)).to(device)
            got = graphs.run("double", double, {"x": x})["twice"]
            assert got.tolist() == (2 * torch.arange(float(length))).tolist()
        numbers = sum(memory_of(graphs).values()) // 4

    assert graphs.refusal_reason is None
    assert graphs.replays == len(lengths) - len(set(lengths))
    assert numbers <= 4 * max(lengths)


def test_only_the_last_graphs_are_kept(graphs, monkeypatch):
    monkeypatch.setattr(_graphs, "MAX_GRAPHS", 2)
    for key in "abc":
        graphs.run(key, double, on_gpu(1.0))
    assert len(graphs._graphs) == 2

    graphs.run("b", double, on_gpu(1.0))
    graphs.run("d", double, on_gpu(1.0))
    assert [key for key, _ in graphs._graphs] == ["b", "d"]


def test_a_dropped_shape_is_never_captured_again(graphs, monkeypatch):
    monkeypatch.setattr(_graphs, "MAX_GRAPHS", 2)
    shapes = [on_gpu(*range(1, n)) for n in (2, 3, 4)]
    for _ in range(4):
        for inputs in shapes:
            graphs.run("double", double, inputs)

    assert len(pretend_graph.captured) == 2
    assert graphs.replays == 2 * 3  # the first shape was dropped in the first turn


def test_a_failed_capture_leaves_the_stream(graphs):
    def failing(inputs):
        if torch.cuda.current_stream() != stream:
            raise RuntimeError("CUDA error: operation not permitted")
        return double(inputs)

    stream = torch.cuda.current_stream()
    with pytest.warns(RuntimeWarning, match="could not be captured"):
        graphs.run("failing", failing, on_gpu(1.0))

    assert torch.cuda.current_stream() == stream


def test_the_record_says_captured_once_a_step_was_replayed(graphs):
    assert graphs.summary.startswith("eager so far: ")
    for _ in range(2):
        graphs.run("double", double, on_gpu(1.0))

    assert graphs.summary == "captured"


def test_a_rare_shape_is_not_captured(gpu):
    graphs = _graphs.GradientGraphs(torch.device(gpu), capture_after_steps=2)
    for _ in range(2):
        graphs.run("double", double, on_gpu(1.0))
    assert not pretend_graph.captured

    graphs.run("double", double, on_gpu(1.0))
    assert len(pretend_graph.captured) == 1


# the pretended GPU's graphs ---------------------------------------------------


def test_a_pretended_pool_without_graphs_takes_no_capture(gpu):
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        pass
    del graph

    refused = pytest.raises(RuntimeError, match="use_count > 0 INTERNAL ASSERT")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph(), pool=pool, stream=stream):
        pass
    assert torch.cuda.current_stream() is stream


def test_pretended_graphs_freeze_what_python_decides(gpu):
    graph = torch.cuda.CUDAGraph()
    factor = 2.0
    x = torch.ones(3).to(gpu)
    with torch.cuda.graph(graph):
        y = x * factor
    factor = 3.0
    x.fill_(5.0)
    graph.replay()

    assert y.tolist() == [10.0] * 3


def test_pretended_graphs_share_memory(gpu):
    """A replay makes the results of other graphs invalid.

    On a GPU this can happen, because graphs share one pool of memory.
    """
    one = torch.cuda.CUDAGraph()
    two = torch.cuda.CUDAGraph()
    x = torch.ones(3).to(gpu)
    with torch.cuda.graph(one):
        y = x * 2
    with torch.cuda.graph(two):
        x + 1
    one.replay()
    two.replay()

    assert y.isnan().all()


def test_a_pretended_capture_refuses_what_a_gpu_refuses(gpu):
    x = torch.ones(3).to(gpu)
    asks = [lambda: x.sum().item(), lambda: torch.ones(3).to(gpu), lambda: x[x > 0]]
    for ask in asks:
        refused = pytest.raises(
            RuntimeError, match="not permitted when stream is capturing"
        )
        with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
            ask()
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
        x.sum().item()
    torch.cuda.set_sync_debug_mode("default")
