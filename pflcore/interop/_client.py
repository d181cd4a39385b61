"""The client's half of a round, on a machine of its own."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pflcore.algorithms import algorithm_of
from pflcore.algorithms._protocol import Algorithm, Payload, Tensors, check_training
from pflcore.check import (
    BatchNormPolicy,
    Model,
    Seed,
    checked,
    device_of,
    require,
    summarize,
)
from pflcore.data._federation import Federation
from pflcore.data._protocols import (
    mask_ignored_label,
    single_client_federation,
    with_validation,
)
from pflcore.data._ragged import Ragged
from pflcore.interop._message import (
    BUFFERS_KEY,
    MessageHeader,
    decode_message,
    download_layout,
    encode_message,
    fingerprint,
    prepare_net,
)
from pflcore.simulation._models import Personalized, client_facts, embed_tensor
from pflcore.simulation._settings import Hardware
from pflcore.simulation._uploads import finite_rows, shrink_towards
from pflcore.simulation.round import batch_norm_policy
from pflcore.train import Clients, Net, Training
from pflcore.train._gpu_flags import REPEATABLE_FLAGS
from pflcore.train._losses import Loss, default_loss
from pflcore.train._select_engine import make_context
from pflcore.train._workers import single_threaded


class Download(dict[str, Any]):
    """The payload [1, ...] that was sent. Raises ValueError for an absent key."""

    def __missing__(self, key: str) -> Any:
        names = ", ".join(self) or "nothing"
        raise ValueError(
            f"download: expected {key!r} in it, got {names}; ask for another."
        )


class Client:
    """One client's half of a round, for every algorithm.

    `train` works on what `Server.download` made, and `model` makes the personalized
    model. What the algorithm keeps at a client stays here; so do batch norm's
    statistics, unless they are averaged. A round leaves no trace where the server did
    not take this client's upload.

    Args:
        model: starts as the server's template does: with the same weights, or from the
            same function and `seed`.
        data: (x, y), {"train": (x, y), "val": ...}, a Dataset, or a Federation of one
            client. From one that was standardized, the personalized model takes raw
            features all the same.
    """

    @checked
    def __init__(  # noqa: PLR0913 (what a run has)
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
        if classes is not None and not is_relabeled and net.head_name is not None:
            # One client may lack samples of some classes that the head scores.
            self.data = replace(self.data, classes=max(classes, net.classes))
        self._fingerprint = fingerprint(self.algorithm, net, self.averages)
        self._download_layout = download_layout(self.algorithm, net)
        self._buffers = net.b0[None]  # [1, b]
        self._client_state: Tensors = {}  # [1, ...]
        # A round with the state and the statistics after it, until the server tells
        # whether it took the upload.
        self._pending: tuple[int, Tensors, Tensor] | None = None

    def train(self, download: Mapping[str, Tensor]) -> tuple[Tensors, int]:
        """This client's work of a round, for `Server.aggregate`.

        Returns the upload, a dict of tensors [1, ...], and the number of training
        samples.
        """
        with self._reproducible():
            down, state_before, header, clients = self._open_download(download)
            if header.round != header.done + 1:
                raise ValueError(
                    "download: expected one to train on, got one for an evaluation; "
                    "ask for download(client_id)."
                )
            new, up, fit = self.algorithm.train(down, state_before, clients)
        self._client_state = state_before
        self._pending = (header.round, state_before | new, fit.buffers)
        if not finite_rows([*new.values(), fit.buffers], 1).all():
            up = _spoil_upload(up)
        buffers = fit.buffers[0] if self.averages else None
        return encode_message(up, header, buffers), int(clients.num_samples[0])

    def model(self, download: Mapping[str, Tensor]) -> Personalized:
        """The personalized model, from `Server.download(client_id, "evaluation")`.

        The download is a dict of tensors [1, ...]. The model takes raw features, also
        where this client's features were standardized.
        """
        model, clients = self._personalized(download)
        tensors = {key: rows[0] for key, rows in model.items()}
        facts = client_facts(self.data, 0)
        return Personalized(
            self.algorithm, clients.net, tensors, clients.buffers[0], *facts
        )

    def evaluate(
        self, download: Mapping[str, Tensor], split: str = "test"
    ) -> dict[str, float]:
        """Evaluates the model of a download [1, ...] on this client's own samples.

        Returns "loss", for classes "accuracy", and "size", the number of samples.
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

    def state_dict(self) -> dict[str, Any]:
        """The state of this client between rounds, for `torch.save`."""
        return {
            "fingerprint": self._fingerprint,
            "own": dict(self._client_state),
            "statistics": self._buffers,
            "pending": self._pending,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from what `state_dict` returned.

        Raises ValueError, and changes nothing, where that is another algorithm's, or of
        a model of other shapes.
        """
        is_mapping = isinstance(state, Mapping)
        if not is_mapping or state.get("fingerprint") != self._fingerprint:
            raise ValueError(
                "state: expected what state_dict() of a Client of this algorithm and "
                "model gives."
            )
        self._client_state = dict(state["own"])
        self._buffers = state["statistics"]
        self._pending = state["pending"]

    # inside -------------------------------------------------------------------
    @contextmanager
    def _reproducible(self) -> Iterator[None]:
        """Runs this client's work in one thread, with the same bits again on a GPU."""
        with single_threaded(), REPEATABLE_FLAGS.set_for(self._context.net.w0.device):
            yield

    def _open_download(
        self, download: Any
    ) -> tuple[Payload, Tensors, MessageHeader, Clients]:
        """Reads a download, after the last round is settled.

        Returns the payload [1, ...], this client's state [1, ...], the header, and what
        a hook trains with.
        """
        net = self._context.net
        device = net.w0.device
        payload, header, sent_buffers = decode_message(
            download, device, self._fingerprint, "download", self._download_layout
        )
        self._check_sent_buffers(sent_buffers)
        down = Download(payload)
        self._settle(header)
        client_state = self._state_for_round(down, header)
        buffers = self._buffers if sent_buffers is None else sent_buffers[None]
        data = single_client_view(self.data, header.number, header.n)
        context = self._context._replace(data=data, rounds=header.rounds)
        number = torch.tensor([header.number])
        clients = Clients(context, number, header.round, buffers.clone())
        return down, client_state, header, clients

    def _check_sent_buffers(self, buffers: Tensor | None) -> None:
        """Raises ValueError where batch norm's statistics [b] of a download do not fit.

        They are sent where they are averaged, and only there.
        """
        b0 = self._context.net.b0
        layout = None if buffers is None else (buffers.shape, buffers.dtype)
        expected = (b0.shape, b0.dtype) if self.averages else None
        name = f"download, {BUFFERS_KEY!r}"
        require(layout == expected, name, summarize(expected), layout)

    def _state_for_round(self, down: Download, header: MessageHeader) -> Tensors:
        """This client's state [1, ...] before the round: a copy.

        Until the server has taken an upload, it is a new client's. The federation may
        have grown since, and rows of the state with it.
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

    def _settle(self, header: MessageHeader) -> None:
        """Keeps or forgets the work of the last round.

        It counts where the server took the upload, as far as the server took it.
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
        self._pending = None

    def _personalized(self, download: Any) -> tuple[Tensors, Clients]:
        """The model [1, ...], and the clients with batch norm's statistics for it."""
        with self._reproducible():
            down, client_state, _, clients = self._open_download(download)
            model = dict(self.algorithm.model(down, client_state, clients))
        buffers = model.pop("batch_norm", clients.buffers)
        return model, replace(clients, buffers=buffers)


def _prepare_client_data(
    data: Federation, net: Net, algorithm: Algorithm, seed: int
) -> Federation:
    """One client's data as it trains on them: of the net's dtype, on its device."""
    x = data.x.to(net.dtype) if data.x.is_floating_point() else data.x
    y = data.y.to(net.dtype) if data.y.is_floating_point() else data.y
    data = replace(data, x=x, y=y).to(net.w0.device)
    data = mask_ignored_label(data, net.ignored_label)
    return with_validation(data, seed) if algorithm.traits.needs_val else data


def single_client_view(data: Federation, number: int, n: int) -> Federation:
    """The federation of n clients as the client `number` sees it.

    Only this client has data, those of the one client of `data`. What is drawn for it
    depends on its number.
    """
    index = {
        split: Ragged.from_single_list(rows[0], number, n)
        for split, rows in data.index.items()
    }
    relabel = None if data.relabel is None else data.relabel.expand(n, -1)
    return data._copy_with(index=index, relabel=relabel)


def _spoil_upload(up: Tensors) -> Tensors:
    """The upload with NaN for every number, so that the server drops it."""
    return {
        key: value * torch.nan if value.is_floating_point() else value
        for key, value in up.items()
    }
