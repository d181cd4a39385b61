"""The client's half of a round, on a machine of its own.

Symbols: P numbers of a model; b numbers of batch norm's statistics. Tensors [1, ...]
have one row, that of this client.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pflcore.algorithms import algorithm_of
from pflcore.algorithms._protocol import Algorithm, Payload, Tensors, check_training
from pflcore.algorithms._task import check_head
from pflcore.check import (
    BatchNormPolicy,
    Model,
    Seed,
    checked,
    device_of,
    require,
    summarize,
    warn_caller,
)
from pflcore.data._federation import Federation
from pflcore.data._protocols import (
    leave_out_unlabelled,
    single_client_federation,
    with_validation,
)
from pflcore.data._ragged import Ragged
from pflcore.interop._message import (
    BUFFERS_KEY,
    CLASSES_KEY,
    MessageHeader,
    decode_download,
    download_layout,
    encode_class_names,
    encode_message,
    fingerprint,
    prepare_net,
)
from pflcore.interop._sides import (
    SideState,
    check_identity,
    copied,
    identity_of,
    moved,
    read_state,
    write_state,
)
from pflcore.simulation._describe import Record
from pflcore.simulation._models import Personalized, client_facts, embed_tensor
from pflcore.simulation._settings import Hardware
from pflcore.simulation._state import batch_norm_policy, check_client_states
from pflcore.simulation._uploads import finite_rows, shrink_towards
from pflcore.train import Clients, Net, Training
from pflcore.train._gpu_flags import REPEATABLE_FLAGS
from pflcore.train._losses import Loss, default_loss
from pflcore.train._select_engine import make_context
from pflcore.train._workers import single_threaded


class Download(dict[str, Any]):
    """A payload [1, ...] that raises ValueError for an absent key."""

    def __missing__(self, key: str) -> Any:
        names = ", ".join(self) or "nothing"
        raise ValueError(
            f"download: expected {key!r} in it, got {names}; ask for another."
        )


class Client:
    """One client's half of a round, for every algorithm.

    `train` trains on a download of `Server.download` and returns the upload. `model`
    returns the personalized model. The algorithm's state of the client stays here. So
    do batch norm's statistics, unless they are averaged. Where the server did not use
    this client's upload, the client's state is as before the round.

    Args:
        algorithm: The algorithm: a name, a class, or an instance with its options. It
            is that of the server.
        model: The model: an `nn.Module`, a function that makes one, or a `Net`. Its
            first weights are those of the server's template: the same tensors, or
            drawn by the same function and `seed`.
        data: (x, y), {"train": (x, y), "val": ...}, a Dataset, or a Federation of one
            client. Where the features of that federation were standardized, the
            personalized model still takes raw features.
        training: The options of the local training.
        seed: The seed of the server, a whole number of 64 bits.
        hardware: The engine, the threads and the device of the local training; by
            default one thread on the CPU.
        batch_norm: The policy for batch norm's running statistics, that of the server.
        loss: A name, a function of (scores, y) or a module. By default it is the cross
            entropy for labels and the squared error for numbers.
    """

    @checked
    def __init__(
        self,
        algorithm: Algorithm | type[Algorithm] | str,
        model: Model,
        data: Any,
        training: Training = Training(),  # noqa: B008 (frozen)
        *,
        seed: Seed = 0,
        hardware: Hardware = Hardware(workers=1),  # noqa: B008 (frozen)
        batch_norm: BatchNormPolicy = "auto",
        loss: Loss | None = None,
    ) -> None:
        self.algorithm = algorithm_of(algorithm)
        check_training(self.algorithm, training)
        self.training = training
        data = single_client_federation(data, dtype=None)
        net = prepare_net(self.algorithm, model, loss or default_loss(data.y), seed)
        net = net.to(device_of(hardware.device))
        self.data = _prepare_client_data(data, net, self.algorithm, seed)
        self.averages = batch_norm_policy(self.algorithm, net, batch_norm) == "average"
        self._context = make_context(
            net,
            self.data,
            training,
            hardware.engine,
            hardware.workers,
            seed,
            graphs=hardware.graphs,
        )
        net = self._context.net
        classes = self.data.classes
        is_relabeled = self.data.relabel is not None
        is_open = not is_relabeled and self.data.class_names is None
        if classes is not None and is_open and net.has_linear_head:
            # One client may lack samples of some classes that the head scores.
            self.data = replace(self.data, classes=max(classes, net.classes))
        self._fingerprint = fingerprint(self.algorithm, net, self.averages)
        self._download_layout = download_layout(self.algorithm, net)
        check_head(self.algorithm, self._context)
        self._buffers = net.b0[None]  # [1, b]
        self._client_state: Tensors = {}  # [1, ...]
        # The round of the training that left them; 0 for those of a new client.
        self._state_round = 0
        # The round, the state and the statistics of the last training, until a download
        # tells whether the server used the upload.
        self._pending: tuple[int, Tensors, Tensor] | None = None

    def train(self, download: Mapping[str, Tensor]) -> tuple[Tensors, int]:
        """Trains on a download, and returns the upload for `Server.aggregate`.

        The results are the upload, a dict of tensors such as "delta" [P], and the
        number of training samples. Raises ValueError for a download that does not fit,
        or was made for an evaluation.

        Args:
            download: The result of `Server.download(client_id)`.
        """
        with self._reproducible():
            down, state_before, header, clients = self._open_download(download)
            if header.round != header.done + 1:
                raise ValueError(
                    "download: expected one to train on, got one for an evaluation; "
                    "ask for download(client_id)."
                )
            new, up, fit = self.algorithm.train(down, state_before, clients)
        check_client_states(state_before, new)
        self._client_state = state_before
        self._pending = (header.round, new, fit.buffers)
        if not finite_rows([*new.values(), fit.buffers], 1).all():
            up = _spoil_upload(up)
        buffers = fit.buffers[0] if self.averages else None
        message = encode_message(up, header, buffers)
        if self.data.class_names is not None:
            message[CLASSES_KEY] = encode_class_names(self.data.class_names)
        return message, int(clients.num_samples[0])

    def model(self, download: Mapping[str, Tensor]) -> Personalized:
        """The personalized model of a download.

        The model takes raw features, also where this client's features were
        standardized. Raises ValueError for a download that does not fit.

        Args:
            download: The result of `Server.download(client_id, "evaluation")`, a dict
                of tensors such as "x" [P].
        """
        model, clients = self._personalized(download)
        tensors = {key: rows[0] for key, rows in model.items()}
        facts = client_facts(self.data, 0)
        return Personalized(
            self.algorithm, clients.net, tensors, clients.buffers[0], **facts
        )

    def evaluate(
        self, download: Mapping[str, Tensor], split: str = "test"
    ) -> dict[str, float]:
        """Evaluates the personalized model of a download on this client's samples.

        Returns "loss", for classes "accuracy", and "size", the number of samples.
        Raises ValueError where the split has no samples.

        Args:
            download: The result of `Server.download(client_id, "evaluation")`, a dict
                of tensors such as "x" [P].
            split: The split of the data to evaluate on.
        """
        size = int(self.data.size(split)[0]) if split in self.data.index else 0
        if not size:
            raise ValueError(
                f"split: this client has no sample of {split!r} to be evaluated on; "
                f"give it some as data={{..., {split!r}: (x, y)}}."
            )
        model, clients = self._personalized(download)
        with self._reproducible():
            scores = clients.scores(model, split, self.algorithm.predict)
            returns = self.algorithm.traits.returns
            loss, accuracy = clients.loss_and_accuracy(scores, split, returns=returns)
        values = {"loss": float(loss), "size": size}
        if accuracy is not None:
            values["accuracy"] = float(accuracy)
        return values

    def state_dict(self) -> SideState:
        """The client's state between rounds, for `torch.save`.

        It consists of copies of tensors and of values that JSON can hold.
        """
        return copied(self._live_state())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over the state that `state_dict` returned.

        Raises ValueError, and changes nothing, where the state is of a client with
        another algorithm, model or option.
        """
        check_identity(state, self._identity)
        device = self._buffers.device
        own_round = state["own_round"]
        pending = None
        if state["pending_round"] is not None:
            statistics = state["pending_statistics"].to(device, copy=True)
            rows = moved(state["pending"], device)
            pending = (state["pending_round"], rows, statistics)
        self._client_state = moved(state["own"], device)
        self._buffers = state["statistics"].to(device, copy=True)
        self._state_round = own_round
        self._pending = pending

    def save(self, folder: str | Path) -> None:
        """Writes `state_dict()` into a file in `folder`, in place of an earlier one.

        Save it after `train`, before the upload is sent. Raises OSError where it cannot
        be written; then the earlier file stands.
        """
        write_state(folder, self._live_state())

    def restore(self, folder: str | Path) -> Client:
        """Loads the state that `save` wrote, and returns the client itself.

        Raises ValueError as `load_state_dict` does, and where the file is absent or
        damaged.
        """
        self.load_state_dict(read_state(folder))
        return self

    def _live_state(self) -> SideState:
        """The state as in `state_dict`, with the client's own tensors."""
        round, rows, statistics = self._pending or (None, {}, self._buffers)
        return {
            "identity": self._identity,
            "own": self._client_state,
            "statistics": self._buffers,
            "own_round": self._state_round,
            "pending": rows,
            "pending_statistics": statistics,
            "pending_round": round,
        }

    @cached_property
    def _identity(self) -> Record:
        """The description by which a state tells clients apart."""
        context = self._context
        return identity_of(
            "client",
            self.algorithm,
            context.net,
            self.averages,
            seed=context.seed,
            training=self.training,  # that of the context keeps what it was told
        )

    @contextmanager
    def _reproducible(self) -> Iterator[None]:
        """A context in which the client's work repeats bit by bit.

        It uses one thread, and torch's repeatable kernels on a GPU.
        """
        with single_threaded(), REPEATABLE_FLAGS.set_for(self._context.net.w0.device):
            yield

    def _open_download(
        self, download: Any
    ) -> tuple[Payload, Tensors, MessageHeader, Clients]:
        """Reads a download, and settles the last round by its header.

        Returns the payload [1, ...], this client's state [1, ...], the header, and the
        clients for the algorithm's hooks.
        """
        net = self._context.net
        device = net.w0.device
        payload, header, sent_buffers = decode_download(
            download, device, self._fingerprint, self._download_layout
        )
        self._check_sent_buffers(sent_buffers)
        down = Download(payload)
        self._settle(header)
        client_state = self._state_for_round(down, header)
        self._warn_of_another_state(header, client_state)
        buffers = self._statistics_for_round(header)
        if sent_buffers is not None:
            buffers = sent_buffers[None]
        data = single_client_view(self.data, header.number, header.n)
        context = replace(self._context, data=data, rounds=header.rounds)
        number = torch.tensor([header.number])
        round = max(1, header.round)
        clients = Clients(context, number, round, buffers.clone())
        return down, client_state, header, clients

    def _check_sent_buffers(self, buffers: Tensor | None) -> None:
        """Raises ValueError where a download's statistics [b] do not fit.

        A download has them exactly where they are averaged.
        """
        b0 = self._context.net.b0
        layout = None if buffers is None else (buffers.shape, buffers.dtype)
        expected = (b0.shape, b0.dtype) if self.averages else None
        name = f"download, {BUFFERS_KEY!r}"
        require(layout == expected, name, summarize(expected), layout)

    def _state_for_round(self, down: Download, header: MessageHeader) -> Tensors:
        """A copy of this client's state [1, ...] before the round.

        Until the server has used an upload, the state is a new client's. Where the
        federation has grown since, rows of the state are longer than before.
        """
        first = self.algorithm.init_client(down, self._context.net, header.n)
        stored = self._client_state if header.accepted else {}
        client_state = {}
        for key, rows in first.items():
            row = rows[:1]
            if key in stored:
                client_state[key] = embed_tensor(stored[key], row)
            else:
                client_state[key] = row.clone()
        return client_state

    def _statistics_for_round(self, header: MessageHeader) -> Tensor:
        """The client's own statistics [1, b] before the round.

        Until the server has used an upload, they are the model's, as the state is a new
        client's. So a state of another run is never read.
        """
        return self._buffers if header.accepted else self._context.net.b0[None]

    def _settle(self, header: MessageHeader) -> None:
        """Keeps the last training's state if the server used its upload.

        Where the server shortened the update, the state follows as far as the
        algorithm's traits say.
        """
        if self._pending is None or header.done < self._pending[0]:
            return
        round, client_state, buffers = self._pending
        if header.accepted == round:
            factor = torch.tensor([header.factor], dtype=torch.float64)
            follows = set(self.algorithm.traits.clipped_with_update)
            for key in client_state.keys() & follows:
                before = self._client_state[key]
                client_state[key] = shrink_towards(client_state[key], before, factor)
            self._client_state = client_state
            self._buffers = buffers
            self._state_round = round
        self._pending = None

    def _warn_of_another_state(self, header: MessageHeader, own: Tensors) -> None:
        """Warns where the client's own state is not that of its last used upload.

        Args:
            header: The header of a download.
            own: The client's state before the round, by name.
        """
        has_own = bool(own) or (self._buffers.numel() and not self.averages)
        if not has_own or header.accepted in (0, self._state_round):
            return
        held = (
            f"of round {self._state_round}" if self._state_round else "a new client's"
        )
        warn_caller(
            f"this client's own state is {held}, and the server last used its upload "
            f"of round {header.accepted}: one of them is older than the other; restore "
            "states that the server and this client saved after the same round.",
            RuntimeWarning,
        )

    def _personalized(self, download: Any) -> tuple[Tensors, Clients]:
        """The model [1, ...], and clients that hold its batch norm's statistics."""
        with self._reproducible():
            down, client_state, _, clients = self._open_download(download)
            context = clients.context.without_augmentation()
            clients = replace(clients, context=context)
            model = dict(self.algorithm.model(down, client_state, clients))
        buffers = model.pop("batch_norm", clients.buffers)
        return model, replace(clients, buffers=buffers)


def _prepare_client_data(
    data: Federation, net: Net, algorithm: Algorithm, seed: int
) -> Federation:
    """The client's data for training, in the net's dtype and device."""
    x = data.x.to(net.dtype) if data.x.is_floating_point() else data.x
    y = data.y.to(net.dtype) if data.y.is_floating_point() else data.y
    data = replace(data, x=x, y=y).to(net.w0.device)
    data = leave_out_unlabelled(data, net.ignored_label)
    return with_validation(data, seed) if algorithm.traits.needs_val else data


def single_client_view(data: Federation, number: int, n: int) -> Federation:
    """A federation of n clients in which only one has data.

    The data are those of the one client of `data`. The client needs its number because
    its random draws depend on it.
    """
    index = {
        split: Ragged.from_single_list(rows[0], number, n)
        for split, rows in data.index.items()
    }
    relabel = None if data.relabel is None else data.relabel.expand(n, -1)
    return data._copy_with(index=index, relabel=relabel)


def _spoil_upload(up: Tensors) -> Tensors:
    """The upload with NaN in place of every floating-point number.

    The server drops it.
    """
    return {
        key: value * torch.nan if value.is_floating_point() else value
        for key, value in up.items()
    }
