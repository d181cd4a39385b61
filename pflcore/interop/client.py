"""One client of any algorithm on a machine of its own: what it keeps, its work of a round, its personalized model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pflcore.algorithms.base import FedAvg, Payload, Tensors
from pflcore.algorithms.lookup import algorithm_of, name_of
from pflcore.data.federation import Federation
from pflcore.data.ragged import Ragged
from pflcore.data.roles import held_out
from pflcore.interop.wire import About, finished, net_of, opened
from pflcore.ops import kinds
from pflcore.simulation.arguments import device_of
from pflcore.simulation.personal import Personalized, grown, one_client
from pflcore.simulation.round import buffers_of, finite, one_by_one
from pflcore.train import Training
from pflcore.train.bridge import Local, prepared
from pflcore.train.losses import Loss, default_loss
from pflcore.train.workers import one_thread


@kinds.takes(training=kinds.a(Training), seed=kinds.SEED, workers=kinds.whole(1))
class Client:
    """One client's half of a round, for every algorithm: `train` on what `Server.download` gave, `model` for its personalized model.

    `model` must start as the server's template does (the same weights, or the same function and `seed`). `data`: (x, y), {"train": (x, y),
    "val": ...}, a Dataset or a Federation of one client. What the algorithm keeps at a client stays here, batch norm's statistics too
    unless they are averaged; a round that the server did not take this client's upload in, leaves no trace.
    """

    def __init__(
        self,
        algorithm: FedAvg | type[FedAvg] | str,
        model: Any,
        data: Any,
        training: Training | None = None,
        *,
        seed: int = 0,
        engine: str = "auto",
        workers: int = 1,
        device: str = "cpu",
        buffers: str = "auto",
        loss: Loss | None = None,
    ) -> None:
        self.algorithm = algorithm_of(algorithm)
        one = one_client(data, dtype=None)
        net = net_of(self.algorithm, model, loss or default_loss(one.y), seed).to(device_of(device))
        x, y = (t.to(net.dtype) if t.is_floating_point() else t for t in (one.x, one.y))
        one = replace(one, x=x, y=y).to(device)
        self.data = held_out(one, seed) if self.algorithm.needs_val else one
        self.policy = buffers_of(self.algorithm, net, buffers)
        self._setting, _ = prepared(net, self.data, training or Training(), engine, workers, seed)
        net = self._setting.net
        if self.data.classes is not None and self.data.relabel is None and net.head_name is not None:  # one client may not have all
            self.data = replace(self.data, classes=max(self.data.classes, net.classes))
            self._setting = self._setting._replace(data=self.data)
        self._statistics = self._setting.net.b0[None]  # [1, b]
        self._own: Tensors = {}  # [1, ...]
        self._pending: tuple[int, Tensors, Tensor] | None = None  # of a round of which the server has not said what became

    def train(self, download: Mapping[str, Tensor]) -> tuple[Tensors, int]:
        """This client's work of a round: its upload, a dict of tensors, and its number of training samples, for `Server.aggregate`."""
        with one_thread():
            down, about, local = self._at(download)
            if about.round != about.done + 1:
                raise ValueError("download: expected one to train on, got one for an evaluation; ask for download(client_id).")
            new, up = self.algorithm.client(down, self._own, local)
        self._pending = about.round, {**self._own, **new}, local.buffers
        if not finite([*new.values(), local.buffers], 1):  # nothing of it is kept, and the server drops it
            self._pending = about.round, self._own, self._statistics
            up = {k: torch.full_like(v, torch.nan) if v.is_floating_point() else v for k, v in up.items()}
        statistics = local.buffers[0] if self.policy == "average" else None
        return finished({k: v[0].clone() for k, v in up.items()}, about, statistics), int(local.size[0])

    def model(self, download: Mapping[str, Tensor]) -> Personalized:
        """The personalized model, from `Server.download(client_id, "evaluation")`."""
        with one_thread():
            down, _, local = self._at(download)
            view = self.algorithm.personal(down, self._own, local)
        return Personalized(self.algorithm, local.net, {k: v[0] for k, v in view.items()}, local.buffers[0], self.data.classes)

    def evaluate(self, download: Mapping[str, Tensor], split: str = "test") -> dict[str, float]:
        """The personalized model on this client's own samples: "loss", for classes "accuracy", and "size", how many they are."""
        size = int(self.data.size(split)[0]) if split in self.data.index else 0
        if not size:
            raise ValueError(
                f"split: this client has no sample of {split!r} to be evaluated on; give it some as data={{..., {split!r}: (x, y)}}."
            )
        with one_thread():
            down, _, local = self._at(download)
            loss, accuracy = one_by_one(self.algorithm, self.algorithm.personal(down, self._own, local), local, split)
        return {"loss": float(loss), "size": size, **({} if accuracy is None else {"accuracy": float(accuracy)})}

    def state_dict(self) -> dict[str, Any]:
        """What this client keeps between rounds, for `torch.save`."""
        whose = {"algorithm": name_of(self.algorithm), "shapes": self._shapes}
        return {**whose, "own": dict(self._own), "statistics": self._statistics, "pending": self._pending}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` gave. ValueError, and nothing changed, where it is something else: another algorithm's, or of a
        model of other shapes."""
        try:
            name, shapes = state["algorithm"], state["shapes"]
            new = dict(state["own"]), state["statistics"], state["pending"]
        except (KeyError, TypeError) as error:
            raise ValueError(f"state: expected what Client.state_dict() gives, got {type(state).__name__} ({error}).") from None
        if name != name_of(self.algorithm):
            raise ValueError(f"state: expected one of {name_of(self.algorithm)}, got one of {name}.")
        if shapes != self._shapes:
            raise ValueError(f"state: it is of a model of other parameters, {shapes}, than this client's, {self._shapes}.")
        self._own, self._statistics, self._pending = new

    @property
    def _shapes(self) -> list[Any]:
        net = self._setting.net
        return [str(net.dtype), *(list(shape) for shape in (*net.shapes, *net.buffer_shapes))]

    # inside ----------------------------------------------------------------------------------------------------------
    def _at(self, download: Mapping[str, Tensor]) -> tuple[Payload, About, Local]:
        """What was sent, and what a hook is given, when the last round is settled."""
        net = self._setting.net
        down, about, statistics = opened(download, net, self.algorithm, "download")
        if (statistics is None) != (self.policy != "average"):
            raise ValueError("download: the server has other `buffers` than this client; give both sides the same.")
        fresh = {k: v[None] for k, v in self.algorithm.init(net, about.n)[1].items()} if self._n != about.n or not self._own else {}
        self._own = {k: grown(self._own[k], v) if k in self._own else v.clone() for k, v in fresh.items()} or self._own
        if self._pending is not None and about.done >= self._pending[0]:
            if about.accepted == self._pending[0]:
                _, own, self._statistics = self._pending
                if about.factor < 1:
                    own = own | self.algorithm.kept(own, self._own, torch.tensor([[about.factor]], dtype=torch.float64))
                self._own = {k: grown(own[k], v) for k, v in self._own.items()}
            self._pending = None
        if self._n != about.n:
            self._setting = self._setting._replace(data=_alone(self.data, about.n))
        rows = self._statistics.clone() if statistics is None else statistics[None].clone()
        setting = self._setting._replace(rounds=about.rounds)
        return down, about, Local(setting, torch.tensor([about.number]), about.round, rows, joined=torch.tensor([about.accepted > 0]))

    @property
    def _n(self) -> int:
        return self._setting.data.n if isinstance(self._setting.data, _Alone) else 0


class _Alone(Federation):
    """A federation of which one client's data are here: whoever is asked for, it is this client. So its draws are those of its number."""

    def __post_init__(self) -> None:
        """Nothing is checked: no two clients of a federation may share a sample."""


class _Same(Ragged):
    """The one list, n times, in the memory of one."""

    def __init__(self, flat: Tensor, n: int) -> None:
        self.flat = flat
        self.begin, self.size = torch.zeros(1, dtype=torch.int64).expand(n), torch.tensor([len(flat)]).expand(n)

    def __getitem__(self, i: Any) -> Any:
        return self.flat


def _alone(one: Federation, n: int) -> Federation:
    relabel = None if one.relabel is None else one.relabel.expand(n, -1)
    return _Alone(
        one.x,
        one.y,
        {split: _Same(rows[0], n) for split, rows in one.index.items()},
        one.classes,
        relabel,
        one.name,
        fields=one.fields,
    )
