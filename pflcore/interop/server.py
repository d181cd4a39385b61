"""The server of any algorithm without a simulation: clients are wherever they are, and come and go."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping
from dataclasses import replace
from numbers import Integral
from typing import Any

import torch

from pflcore.algorithms.base import Cohort, FedAvg, State, Tensors, cohort_from
from pflcore.algorithms.lookup import algorithm_of, name_of
from pflcore.interop.wire import STATISTICS, About, method_number, net_of, opened, packed
from pflcore.ops import kinds
from pflcore.simulation.arguments import check_start, limit, whole
from pflcore.simulation.personal import with_one_more
from pflcore.simulation.round import Outcome, begin, buffers_of, receive
from pflcore.train import memory
from pflcore.train.random import generator_of

_Form = dict[str, tuple[torch.Size, torch.dtype]]
SAMPLES = 2**40  # of one client; the sum over clients is a whole number of 64 bits
PURPOSES = {"train": "send", "evaluation": "evaluation"}  # what the draws of each are called


@kinds.takes(template=kinds.MODEL, seed=kinds.SEED, clip=kinds.POSITIVE)
class Server:
    """The server's half of a round, for every algorithm: `download` for each client, `aggregate` for those who answered.

    `template` is the model (an `nn.Module`, a function that makes one, or a `Net`), `rounds` how many there will be (for schedules). A
    client is called by any string or whole number; it is numbered when it is first seen: 0 to num_clients - 1 are themselves (so is
    an algorithm's `target`), others take the first free one, and beyond `num_clients` the state grows by a client, between rounds.
    With `Client`s of the same model, seed and training it gives what `Simulation` gives. `buffers`, `clip`: as there.
    """

    def __init__(
        self,
        algorithm: FedAvg | type[FedAvg] | str,
        template: Any,
        num_clients: int,
        *,
        rounds: int = 100,
        seed: int = 0,
        buffers: str = "auto",
        clip: float | None = None,
    ) -> None:
        self.algorithm = algorithm_of(algorithm)
        self.net = net_of(self.algorithm, template, "cross_entropy", seed)
        self.rounds, self.seed, self.clip = whole("rounds", rounds, 1), seed, limit("clip", clip)
        self.policy = buffers_of(self.algorithm, self.net, buffers)
        n = whole("num_clients", num_clients, 1)
        self._state = begin(self.algorithm, self.net, n, server=True)
        self._accepted = torch.zeros(n, dtype=torch.long)  # [N] the last round that each client was part of
        self._factor = torch.ones(n, dtype=torch.float64)  # [N] how much of its upload was taken then
        self._numbers: dict[Hashable, int] = {}
        self._gone: set[int] = set()
        self._form: tuple[int, _Form] | None = None  # of the last round's uploads, with N
        self._begun = False  # has somebody been given what this round trains on?

    @property
    def round(self) -> int:
        """How many rounds have been played."""
        return self._state.round

    @property
    def clients(self) -> dict[Hashable, int]:
        """The clients that are known, and their numbers in what `report` gives."""
        return dict(self._numbers)

    def download(self, client_id: Hashable, purpose: str = "train") -> Tensors:
        """What a client needs for the round that comes ("train"), or for its model as it is now ("evaluation"): a dict of tensors."""
        if purpose not in PURPOSES:
            raise ValueError(f"purpose: expected 'train' or 'evaluation', got {purpose!r}.")
        number, state = self.join(client_id), self._state
        self._begun |= purpose == "train"
        round, n, one = state.round + 1 if purpose == "train" else max(1, state.round), len(state.buffers), torch.ones(1)
        cohort = Cohort(torch.tensor([number]), one.double(), one.long(), n, round, self.rounds)
        down = self.algorithm.send(state.g, cohort, generator_of(self.seed, round, PURPOSES[purpose]))
        about = About(number, n, self.net.size, round, self.rounds, state.round, int(self._accepted[number]), method_number(self.algorithm))
        about = about._replace(bits=int(self._factor.view(torch.int64)[number]))
        return packed(down, about, state.buffers[number] if self.policy == "average" else None)

    def aggregate(self, uploads: Mapping[Any, tuple[Tensors, int]], strict: bool = True) -> Outcome:
        """Ends a round with what `Client.train` gave: {client id: (upload, number of training samples)}.

        Who is not there was absent. Says what happened: `dropped` (clients whose upload is not finite: they were absent too), `void` (then
        nothing changed), `moved`, `clipped`. ValueError in one sentence, and nothing changed, for an upload that does not fit; without
        `strict` it is left out with a RuntimeWarning, and where none fits the round is void.
        """
        if not isinstance(uploads, Mapping) or not uploads:
            raise ValueError(f"uploads: expected {{client id: (upload, number of samples)}} of at least one client, got {uploads!r:.80}.")
        state, read = self._state, []
        for client, given in uploads.items():
            try:
                read.append((self._known(client), client, *self._upload(client, given)))
            except ValueError as error:
                _refuse(str(error), strict)
        forms = [_form_of(up) for _, _, up, _ in read]
        same = self._form is not None and self._form[0] == len(state.buffers)
        form = self._form[1] if same and self._form else max(forms, key=forms.count, default={})  # of the first round, what most sent
        for (_, client, *_), mine in zip(read, forms, strict=True):
            if mine != form:
                said = f"client {client!r}: its upload holds {_words(mine)}, expected {_words(form)} and the same `buffers` on both sides."
                _refuse(said, strict)
        read = sorted((r for r, mine in zip(read, forms, strict=True) if mine == form), key=lambda r: r[0])
        order, ups, sizes = [(number, client) for number, client, *_ in read], [r[2] for r in read], [r[3] for r in read]
        ids = torch.tensor([number for number, _ in order])
        absent = set(self.algorithm.required) - set(ids.tolist())
        if absent:
            _refuse(f"uploads: the target, client number {min(absent)}, must take part in every round.", strict)
        if absent or not read:
            return self._voided([client for _, client in order])
        cohort = cohort_from(self.algorithm, ids, torch.tensor(sizes), len(state.buffers), state.round + 1, self.rounds)
        up = {k: torch.stack([u[k] for u in ups]) for k in ups[0]}
        buffers, outcome = up.pop(STATISTICS, state.buffers[ids.to(state.buffers.device)]), Outcome(ids.tolist())
        buffers[(buffers[:, self.net.variances] < 0).any(1)] = torch.nan  # no variance, and everybody's square root of it would be NaN
        try:
            self._state = receive(self.algorithm, state, cohort, up, {}, buffers, outcome, self.policy, self.clip)
        except (LookupError, RuntimeError, ValueError) as error:
            if self._form is not None or memory.ran_out(error):
                raise
            if not strict:
                _refuse(f"round {state.round + 1} is void: {error}", strict)
                return self._voided([client for _, client in order])
            why = f" ({str(error).strip('. ')})" if isinstance(error, ValueError) else ""  # a sentence, the algorithm's own perhaps
            raise ValueError(
                f"uploads: {name_of(self.algorithm)} cannot use what each of them holds, {_words(form)}{why}; give both sides one "
                "algorithm, model and `buffers`."
            ) from error
        names, self._begun = dict(order), False
        if not outcome.void:
            self._form = len(state.buffers), form
            taken = [i for i in outcome.ids if i not in outcome.dropped]
            self._accepted[taken], self._factor[taken] = self._state.round, 1.0 if outcome.factor is None else outcome.factor
        ids_of: dict[str, Any] = {k: [names[i] for i in getattr(outcome, k)] for k in ("ids", "dropped", "clipped")}
        return replace(outcome, **ids_of)

    def join(self, client_id: Hashable) -> int:
        """A client's number; a new one's first `download` does the same. ValueError where a round that has begun would have to grow."""
        if not isinstance(client_id, str | Integral) or isinstance(client_id, bool):
            raise TypeError(f"client_id: expected a string or a whole number, got {client_id!r}.")
        if client_id in self._numbers:
            return self._numbers[client_id]
        n, taken = len(self._accepted), {*self._numbers.values(), *self._gone}
        first = next((i for i in range(n) if i not in taken), n)
        number = client_id if isinstance(client_id, Integral) and 0 <= client_id < n and client_id not in taken else first
        if number == n:
            if self._begun:
                raise ValueError(
                    f"client {client_id!r}: the round has begun with {n} clients; let it come after aggregate, or raise num_clients."
                )
            void, (state, _) = self._state.void, with_one_more(self.algorithm, self._state, self.net, n)
            self._state, self._accepted = replace(state, void=void), torch.cat([self._accepted, torch.zeros(1, dtype=torch.long)])
            self._factor = torch.cat([self._factor, torch.ones(1, dtype=torch.float64)])
        self._numbers[client_id] = number
        return number

    def leave(self, client_id: Hashable) -> None:
        """Forgets who has a number, for good: whoever comes by this id later is a newcomer. What the method holds of it, stays."""
        self._gone.add(self._known(client_id))
        del self._numbers[client_id]

    def report(self) -> Tensors:
        """The algorithm's own report of the last round: mixing weights, clusters, ..., by the clients' numbers."""
        return self.algorithm.report(self._state.g)

    def state_dict(self) -> dict[str, Any]:
        """Everything that changes, in tensors of its own, numbers, strings and dicts, as `torch.save` and `torch.load` take it."""
        s = self._state
        tensors = {"statistics": s.buffers, "joined": s.joined, "accepted": self._accepted, "factor": self._factor}
        return {
            "algorithm": name_of(self.algorithm),
            "g": {k: v.clone() for k, v in s.g.items()},
            **{k: v.clone() for k, v in tensors.items()},
            "round": s.round,
            "void": s.void,
            "numbers": dict(self._numbers),
            "gone": sorted(self._gone),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` gave. ValueError, and nothing changed, where it is another algorithm's or another model's."""
        try:
            g, n = {k: v.clone().to(self.net.w0.device) for k, v in state["g"].items()}, len(state["statistics"])
            new = State(g, {}, state["statistics"].clone(), int(state["round"]), int(state["void"]), state["joined"].clone())
            accepted, factor = state["accepted"].clone(), state["factor"].clone()
            numbers, gone, name = dict(state["numbers"]), set(state["gone"]), state["algorithm"]
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"state: expected what Server.state_dict() gives, got {type(state).__name__} ({error}).") from None
        if name != name_of(self.algorithm):
            raise ValueError(f"state: expected one of {name_of(self.algorithm)}, got one of {name}.")
        fresh = self.algorithm.init(self.net, n)[1]
        try:
            check_start(replace(new, own={k: v.expand(n, *v.shape) for k, v in fresh.items()}), self.algorithm, self.net, n)
        except ValueError as error:
            raise ValueError(str(error).replace("warm_start", "state")) from None
        self._state, self._accepted, self._factor, self._numbers, self._gone = new, accepted, factor, numbers, gone
        self._form, self._begun = None, False

    # inside ----------------------------------------------------------------------------------------------------------
    def _voided(self, clients: list[Any]) -> Outcome:
        self._state, self._begun = replace(self._state, round=self.round + 1, void=self._state.void + 1), False
        return Outcome(clients, void=True)

    def _known(self, client: Hashable) -> int:
        if client not in self._numbers:
            raise ValueError(f"client {client!r}: it is not known here; let it download first.")
        return self._numbers[client]

    def _upload(self, client: Any, given: Any) -> tuple[Tensors, int]:
        """One client's upload and its number of samples."""
        who, number = f"client {client!r}", self._known(client)
        if not (isinstance(given, tuple) and len(given) == 2):
            raise ValueError(f"{who}: expected (upload, number of samples), got {type(given).__name__}.")
        payload, about, statistics = opened(given[0], self.net, self.algorithm, who)
        if (about.number, about.round) != (number, self.round + 1):
            raise ValueError(
                f"{who}: its upload is number {about.number}'s of round {about.round}, expected {number}'s of round {self.round + 1}; "
                "leave it out."
            )
        up = {k: v[0] for k, v in payload.items()} | ({} if statistics is None else {STATISTICS: statistics})
        expected = _form_of({STATISTICS: self.net.b0} if self.policy == "average" else {})
        if _form_of({} if statistics is None else {STATISTICS: statistics}) != expected:
            raise ValueError(f"{who}: its upload holds {_words(_form_of(up))}, expected the same model and `buffers` on both sides.")
        return up, whole(f"{who}, number of samples", given[1], 1, SAMPLES)


def _refuse(said: str, strict: bool) -> None:
    if strict:
        raise ValueError(said)
    warnings.warn(said, RuntimeWarning, stacklevel=3)


def _form_of(up: Tensors) -> _Form:
    return {k: (v.shape, v.dtype) for k, v in up.items()}


def _words(form: _Form) -> str:
    return ", ".join(f"{k} {list(shape)} {str(dtype).removeprefix('torch.')}" for k, (shape, dtype) in form.items()) or "nothing"
