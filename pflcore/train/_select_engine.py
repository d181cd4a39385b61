"""Selects the engine of a run by a trial before round 1.

First one batch runs through a copy of the module, which shows facts of the model that
the engines need (`_first_batch`). Then each candidate computes the losses and gradients
of the probes (`_probe`), and is used only if they match those of the module.

"loop" is always tried first and must match: otherwise the module is refused, whatever
engine the user named. "auto" makes two choices, and times neither: whether the kernels
compute the run's own loss, and how autograd computes everything else (`Engine`).
"""

from __future__ import annotations

import copy

import torch.nn as nn

from pflcore.check import warn_caller
from pflcore.data._federation import Federation
from pflcore.train._body import Body, find_body
from pflcore.train._chain import Chain, NotAChain, find_chain
from pflcore.train._context import (
    CPU_BLOCK_CLIENTS,
    GPU_BLOCK_CLIENTS,
    TrainContext,
)
from pflcore.train._engines import Engine
from pflcore.train._first_batch import prepare_net
from pflcore.train._gpu_flags import NO_TF32_FLAGS, REPEATABLE_FLAGS
from pflcore.train._graphs import GradientGraphs
from pflcore.train._net import Net
from pflcore.train._probe import (
    EngineProbe,
    Mismatch,
    first_mismatch,
    make_probes,
)
from pflcore.train._training import Training
from pflcore.train._validate import MismatchError
from pflcore.train._workers import Workers, single_threaded

# A CPU trains clients of larger models faster one by one than a block at once.
VMAP_MAX_WEIGHTS = 1 << 16
NO_CHAIN_OF_BF16 = "precision is 'bf16', and the chain's kernels compute in float32"
# Layers that a CPU trains faster in a loop than under vmap.
SLOW_UNDER_VMAP = {"convolutions": nn.modules.conv._ConvNd, "an LSTM": nn.LSTM}


def make_context(
    net: Net,
    data: Federation,
    training: Training,
    engine: str = "auto",
    workers: int | None = None,
    seed: int = 0,
    rounds: int = 1,
    clients_per_block: int | None = None,
    graphs: bool = True,
) -> TrainContext:
    """The context of a run, with the engine that the trial selects.

    Facts of the model that the first batch shows are set in a copy of `net`, which the
    context holds. Raises MismatchError where model, data and loss do not fit together,
    or where the engine that the user named does not match the module.

    Args:
        net: The model as a function of a row.
        data: The federation.
        training: The options of training.
        engine: "auto", "chain", "loop" or "vmap".
        workers: The number of threads; by default the cores that the process may use.
        seed: The seed of the run.
        rounds: The number of rounds.
        clients_per_block: The largest number of clients of a block under vmap; by
            default 64 on a CPU and 128 on a GPU.
        graphs: True for CUDA graphs of the steps on a GPU, where they can be captured.
    """
    device = net.w0.device
    training = training.with_kept_schedule()
    training.step_sizes(rounds)  # a schedule that raises an error raises it first
    with (
        single_threaded(),
        REPEATABLE_FLAGS.set_for(device),
        NO_TF32_FLAGS.set_for(device),
    ):
        # Another run of the same net may be on data that show other facts.
        net = copy.copy(net).with_fields(data.fields)
        prepare_net(net, data, training)
        probes = make_probes(net, data, training.precision)
        selected = select_engine(net, data, probes, engine, training)
        gradient_graphs = None
        if data.device.type == "cuda":
            gradient_graphs = GradientGraphs(device)
            gradient_graphs.refusal_reason = "asked for"  # a record: "eager: asked for"
            if graphs:
                gradient_graphs = verified_graphs(probes, selected)
    default_clients = GPU_BLOCK_CLIENTS
    if data.device.type == "cpu":
        default_clients = CPU_BLOCK_CLIENTS
    return TrainContext(
        net,
        data,
        training,
        selected,
        Workers(workers, data.device),
        seed,
        rounds,
        clients_per_block=clients_per_block or default_clients,
        graphs=gradient_graphs,
    )


def select_engine(
    net: Net,
    data: Federation,
    probes: list[EngineProbe],
    name: str,
    training: Training,
) -> Engine:
    """The engine called `name`; for "auto" the fastest one that matches.

    `name` is "auto", "chain", "loop" or "vmap". Raises MismatchError where the engine
    of that name does not match, and where "loop" does not. "loop" calls the module as
    plain torch does. If it does not match, the module is no function of its parameters,
    and nothing can train it.
    """
    # A module that counts its calls matches at the first client, but not at the next.
    trials = 2 if len(probes[0].w) == 1 else 1
    for _ in range(trials):
        mismatch = first_mismatch(probes, Engine("loop"))
        if mismatch is not None:
            raise MismatchError(
                "model: as a function of its parameters it is not what the module "
                f"computes: {mismatch.words}; its forward and the loss must use the "
                "parameters where they are registered, nothing that another pass has "
                "changed (such as a counter, a cache or a mode), and no random numbers "
                "but those of pflcore.nn.Dropout."
            )
    if name == "loop":
        return Engine("loop")
    if name == "vmap":
        vmap, mismatch = matching_vmap(net, data, probes)
        if mismatch is not None:
            raise MismatchError(
                f"engine: 'vmap' cannot train this model: {mismatch.words}; take "
                "'auto' or 'loop'."
            )
        return vmap
    chain, reason = matching_chain(net, data, probes, training)
    if chain is None and name == "chain":
        raise MismatchError(
            f"engine: 'chain' cannot train this model: {reason}; take 'auto'."
        )
    loop_reason = slow_under_vmap(net)
    if loop_reason is None:
        vmap, mismatch = matching_vmap(net, data, probes)
        if mismatch is None:
            # The ops of a chain need no padding.
            pads = vmap.pads and chain is None
            return vmap._replace(chain=chain, reason=reason, pads=pads)
        loop_reason = f"vmap cannot train this model: {mismatch.words}"
    if chain is None:
        reason = f"{loop_reason}; {reason}"
    body = None if chain is None else matching_body(net, data, probes, chain)
    return Engine("loop", chain, reason, body=body)


def matching_body(
    net: Net, data: Federation, probes: list[EngineProbe], chain: Chain
) -> Body | None:
    """The layers before the head by the kernels, if they match the probes.

    Warns where they do not, as `matching_chain` does.
    """
    body = find_body(net, chain, tuple(data.shape))
    if body is None:
        return None
    mismatch = first_mismatch(probes, Engine("loop", body=body))
    if mismatch is None:
        return body
    warn_caller(
        "pflcore: the chain found for the layers before the head is not the model: "
        f"{mismatch.words}; they are trained without.",
        UserWarning,
    )
    return None


def matching_vmap(
    net: Net, data: Federation, probes: list[EngineProbe]
) -> tuple[Engine, Mismatch | None]:
    """The engine "vmap", and its mismatch with the probes, or None.

    On a GPU it evaluates and pads where it then matches, too: where the model computes
    the scores of each sample by itself. Padding also needs a loss that leaves out
    samples without a label.
    """
    candidates = [Engine("vmap")]
    if data.device.type == "cuda":
        candidates.insert(0, Engine("vmap", evaluates=True))
        has_labels = net.ignored_label is not None and not data.y.is_floating_point()
        is_joined = net.merge_last_sample or net.buffer_names  # as for batch norm
        if has_labels and not is_joined:
            candidates.insert(0, Engine("vmap", pads=True, evaluates=True))
    for engine in candidates:
        mismatch = first_mismatch(probes, engine)
        if mismatch is None:
            break
    return engine, mismatch


def slow_under_vmap(net: Net) -> str | None:
    """The reason why vmap would be slower than a loop, or None."""
    if net.w0.device.type != "cpu":
        return None
    for noun, layer_type in SLOW_UNDER_VMAP.items():
        if any(isinstance(layer, layer_type) for layer in net.module.modules()):
            return f"a model with {noun}, on a CPU"
    if net.size > VMAP_MAX_WEIGHTS:
        return f"a model of {net.size} weights, on a CPU"
    return None


def matching_chain(
    net: Net, data: Federation, probes: list[EngineProbe], training: Training
) -> tuple[Chain | None, str]:
    """The chain of the model that matches the probes, or None, and the reason.

    Warns where a chain was found whose numbers differ: that is an error of this
    library, while a model without a chain is not.
    """
    if training.precision is not None:
        return None, NO_CHAIN_OF_BF16
    try:
        chain = find_chain(net, data, training.batch_size)
    except NotAChain as error:
        return None, f"no chain of layers that the kernels know: {error}"
    # The kernels compute these gradients, whichever way autograd takes.
    mismatch = first_mismatch(probes, Engine("loop", chain))
    if mismatch is not None:
        reason = f"the chain found for this model is not the model: {mismatch.words}"
        if mismatch.is_numeric:
            warn_caller(f"pflcore: {reason}; it is trained without.", UserWarning)
        return None, reason
    reason = "a chain of layers that the kernels know"
    if training.transforms:
        # The kernels do not take the steps then.
        reason += "; it gives the gradients of augmented batches, and torch takes the "
        reason += "steps"
    return chain, reason


def verified_graphs(probes: list[EngineProbe], engine: Engine) -> GradientGraphs:
    """The CUDA graphs of a run, after a trial on the probes.

    The trial replays captured steps. Where a capture fails, or a replay does not match
    the module, the graphs refuse to capture, and the run goes on without them.
    """
    device = probes[0].w.device
    graphs = GradientGraphs(device)
    tried_graphs = GradientGraphs(device, capture_after_steps=0)
    mismatch = first_mismatch(probes, engine, tried_graphs)
    graphs.refusal_reason = tried_graphs.refusal_reason
    if graphs.refusal_reason is None and mismatch is not None:
        graphs.refusal_reason = f"captured, {mismatch.words}"
    return graphs
