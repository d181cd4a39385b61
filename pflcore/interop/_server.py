"""The server's half of a round, for clients that come and go.

Symbols: N clients of the federation; b numbers of batch norm's statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import annotated_types as at
import torch

from pflcore.algorithms import algorithm_of
from pflcore.algorithms._protocol import (
    Algorithm,
    BadUpload,
    Claim,
    Cohort,
    Stop,
    Tensors,
)
from pflcore.check import (
    BatchNormPolicy,
    Model,
    PositiveFloat,
    PositiveInt,
    Seed,
    Words,
    checked,
    reject,
    require,
    warn_caller,
)
from pflcore.interop._message import (
    BUFFERS_KEY,
    CLASSES_KEY,
    MAX_CLIENTS,
    MAX_SAMPLES,
    MessageHeader,
    convert,
    decode_class_names,
    describe_layout,
    encode_message,
    fingerprint,
    open_message,
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
from pflcore.simulation._models import with_new_client
from pflcore.simulation._rows import CohortRows
from pflcore.simulation._state import (
    batch_norm_policy,
    check_state,
    flatten_state,
    initial_state,
    unflatten_state,
)
from pflcore.simulation._uploads import CohortResult, RoundOutcome, accept
from pflcore.simulation.round import commit, serve
from pflcore.train import Training
from pflcore.train._memory import is_out_of_memory

ClientCount = Annotated[int, at.Interval(ge=1, le=MAX_CLIENTS)]
# Errors that an algorithm may raise where the uploads are of another algorithm.
UNUSABLE_UPLOAD_ERRORS = (
    ArithmeticError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


class Upload(NamedTuple):
    """One client's upload of a round.

    Attributes:
        number: The client's number.
        tensors: The tensors of the upload by their keys, without a dimension of
            clients.
        num_samples: The number of samples in the client's training split.
        class_names: The names of the client's classes; None where it sent none.
    """

    number: int
    tensors: Tensors
    num_samples: int
    class_names: tuple[str, ...] | None


class Server:
    """The server's half of a round, for every algorithm.

    A round has two calls. `download` makes the tensors that one client needs.
    `aggregate` ends the round with the uploads of the clients that answered. With
    `Client`s of the same model, seed and training options the results are those of
    `Simulation`.

    A client's id is any string or whole number. The server gives each client a number
    when it first sees the id:

    - An id that is a whole number from 0 to num_clients - 1 is the number itself, if
      no other client has it. So an algorithm's `target` is the client with that id.
    - Any other id receives the first free number.
    - Where no number is free, the state grows by one client, between two rounds.

    Args:
        algorithm: The algorithm: a name, a class, or an instance with its options.
        template: The model: an `nn.Module`, a function that makes one, or a `Net`.
        num_clients: The number of clients that the state has room for at first.
        rounds: The planned number of rounds, which schedules depend on.
        seed: The seed of the model's first weights and of the algorithm's draws, a
            whole number of 64 bits.
        batch_norm: The policy for batch norm's running statistics: "average", "local",
            or "auto" for the algorithm's own, as in `Simulation`.
        clip: The largest Euclidean norm of an update. Longer updates are shortened to
            it, as in `Robustness`; None shortens none.
        training: The clients' options of training, where they are known. Numbers that
            follow from them, such as FedNova's steps, are then checked by them; with
            None they need only be possible.
        classes: The names of the classes 0, 1, ..., as those of an ImageFolder. An
            upload of a client whose classes have other names is refused: its labels
            mean something else. With None they are the names of the first client whose
            upload counts, of several in a round that with the smallest number.
    """

    @checked
    def __init__(
        self,
        algorithm: Algorithm | type[Algorithm] | str,
        template: Model,
        num_clients: ClientCount,
        *,
        rounds: PositiveInt = 100,
        seed: Seed = 0,
        batch_norm: BatchNormPolicy = "auto",
        clip: PositiveFloat | None = None,
        training: Training | None = None,
        classes: Sequence[str] | None = None,
    ) -> None:
        self.algorithm = algorithm_of(algorithm)
        self.net = prepare_net(self.algorithm, template, "cross_entropy", seed)
        self.rounds = rounds
        self.seed = seed
        self.clip = clip
        self.training = training
        policy = batch_norm_policy(self.algorithm, self.net, batch_norm)
        self.averages = policy == "average"
        self._state = initial_state(
            self.algorithm, self.net, num_clients, clients=False
        )
        self._fingerprint = fingerprint(self.algorithm, self.net, self.averages)
        # `accepted` and `factor` of `MessageHeader`, by the client's number
        self._accepted: dict[int, tuple[int, float]] = {}
        self._numbers: dict[Hashable, int] = {}
        # Numbers of clients that have left. No later client receives one of them.
        self._retired: list[int] = []
        self._report: Tensors = {}
        self.classes = None if classes is None else tuple(classes)
        # The client that the names came from; None where they were given
        self._named_by: Hashable | None = None
        # True once a client may train for the coming round
        self._round_started = False

    @property
    def round(self) -> int:
        """The number of rounds that have been played."""
        return self._state.round

    @property
    def clients(self) -> dict[Hashable, int]:
        """The number of each known client, by its id."""
        return dict(self._numbers)

    @property
    def num_clients(self) -> int:
        """The number of clients that the state has room for."""
        return len(self._state.participated)

    @checked
    def download(
        self, client_id: Hashable, purpose: Literal["train", "evaluation"] = "train"
    ) -> Tensors:
        """The message for one client: tensors by name.

        A new client receives its number here, as by `join`.

        Args:
            client_id: The client's id, a string or a whole number.
            purpose: "train" for the client's work of the coming round. "evaluation" for
                its personalized model after the last round.
        """
        number = self.join(client_id)
        done = self.round
        if purpose == "train":
            self._round_started = True
            cohort = self._cohort([number], [1], done + 1)
        else:
            cohort = self._cohort([number], [1], max(1, done), purpose)
        accepted, factor = self._accepted.get(number, (0, 1.0))
        header = MessageHeader(
            number=number,
            n=self.num_clients,
            fingerprint=self._fingerprint,
            round=done + 1 if purpose == "train" else done,
            rounds=self.rounds,
            done=done,
            accepted=accepted,
            factor=factor,
        )
        buffers = self._state.buffers[number] if self.averages else None
        payload = self.algorithm.send(self._state.server, cohort)
        return encode_message(payload, header, buffers)

    def aggregate(
        self, uploads: Mapping[Any, tuple[Tensors, int]], strict: bool = True
    ) -> RoundOutcome:
        """Ends a round with the results of `Client.train`, by client.

        Clients that are not in `uploads` were absent. An upload has the shapes and the
        dtypes that the algorithm and the model say. A dtype that holds more numbers,
        such as float64 for float32, is converted; a narrower one is refused.

        Fields of the outcome are:

        - `ids`: the clients with an upload that fits.
        - `dropped`: those of them whose upload is not finite, or claims what cannot be.
          They count as absent.
        - `void`: True where the round changed nothing, for the reason `void_reason`.
        - `relative_update_norm`: each update's norm divided by the median norm.
        - `clipped`: the clients whose update was shortened to `clip`.

        Args:
            uploads: {client id: (upload, number of training samples)}.
            strict: True raises ValueError, and changes nothing, for an upload that does
                not fit and for no uploads. It raises ValueError also where the
                algorithm would end a run. False warns with a RuntimeWarning instead: it
                leaves the upload out, and a round that cannot be played is void.
        """
        wanted = "{client id: (upload, number of samples)} of at least one client"
        is_given = isinstance(uploads, Mapping) and (uploads or not strict)
        require(is_given, "uploads", wanted, uploads)
        read = self._read_uploads(uploads, strict)
        names = {upload.number: client for client, upload in read.items()}
        absent = set(self.algorithm.traits.required_clients) - set(names)
        if absent:
            _raise_or_warn(
                f"uploads: the target, client number {min(absent)}, must take part in "
                "every round.",
                strict,
            )
        outcome = RoundOutcome(list(names), void=True)
        if read and not absent:
            outcome = self._try_round(read, names, strict)
        if outcome.void:
            self._state = commit(self._state, {}, outcome)
        elif self.classes is None:
            self._learn_classes(read, outcome)
        self._round_started = False
        return replace(
            outcome,
            ids=[names[i] for i in outcome.ids],
            dropped=[names[i] for i in outcome.dropped],
            clipped=[names[i] for i in outcome.clipped],
        )

    def _learn_classes(
        self, uploads: Mapping[Any, Upload], outcome: RoundOutcome
    ) -> None:
        """Takes the names of classes from the first client whose upload counted."""
        for client, upload in uploads.items():
            counts = upload.number not in outcome.dropped
            if counts and upload.class_names is not None:
                self.classes = upload.class_names
                self._named_by = client
                return

    def join(self, client_id: Hashable) -> int:
        """The number of a client, where a new client receives one.

        A new client's first `download` does the same. Raises ValueError where the state
        would have to grow in a round that has begun.
        """
        is_word = isinstance(client_id, str)
        is_number = isinstance(client_id, Integral) and not isinstance(client_id, bool)
        wanted = "a string or a whole number"
        require(is_word or is_number, "client_id", wanted, client_id)
        if client_id in self._numbers:
            return self._numbers[client_id]
        n = self.num_clients
        number = self._free_number(client_id)
        if number == n:
            if self._round_started:
                raise ValueError(
                    f"client {client_id!r}: expected no newcomer in a round begun with "
                    f"{n} clients; let it join after the round."
                )
            self._state, _ = with_new_client(
                self.algorithm, self._state, self.net, n, torch.arange(n)
            )
        self._numbers[client_id] = number
        return number

    def _free_number(self, client_id: Hashable) -> int:
        """A new client's number: its id, the first free one, or N."""
        n = self.num_clients
        taken = {*self._numbers.values(), *self._retired}
        if isinstance(client_id, Integral) and 0 <= client_id < n:
            number = int(client_id)
            if number not in taken:
                return number
        return next((i for i in range(n) if i not in taken), n)

    def leave(self, client_id: Hashable) -> None:
        """Forgets a client. Its id may name a new client later.

        The algorithm's state keeps what it has of the client. Where the names of the
        classes came from this client, they are forgotten, too.
        """
        self._retired.append(self._numbers.pop(client_id))
        if client_id == self._named_by:
            self.classes = None
            self._named_by = None

    def report(self) -> Tensors:
        """The algorithm's report of the last round, with mixing weights [N, N].

        Its tensors are those of the algorithm's hook `report`. Clients stand in them
        by their numbers.
        """
        return self._report

    def state_dict(self) -> SideState:
        """The server's state between rounds: all that the next round needs.

        It consists of copies of tensors and of values that JSON can hold, so that
        `torch.load` needs no pickled classes.
        """
        return copied(self._live_state())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over the state that `state_dict` returned.

        The rounds that follow give the same numbers as those of an unbroken run. Raises
        ValueError, and changes nothing, where the state is of a server with another
        algorithm, model or option, or with other classes. `num_clients` may differ.
        """
        check_identity(state, self._identity)
        saved = None if state["classes"] is None else tuple(state["classes"])
        given = self.classes if self._named_by is None else None
        if given and saved and given != saved:
            names = f"{', '.join(saved)}, the names in the saved state"
            reject("classes", names, Words(", ".join(given)))
        before = flatten_state(self._state)
        tensors = {}
        for name, tensor in state["state"].items():
            # A tensor that the server added during the run has no device before it.
            device = before.get(name, self._state.buffers).device
            tensors[name] = tensor.to(device, copy=True)
        new = unflatten_state(tensors, state["round"], state["void"])
        check_state(new, self.algorithm, self.net, len(new.participated))
        # A server that was given a module drew its first weights anew.
        first = moved(state["net"], self.net.w0.device)
        net = self.net.to(self.net.w0.device)
        net.w0 = first["w0"]
        net.b0 = first["b0"]
        self.net = net
        self._state = new
        self._report = moved(state["report"], self.net.w0.device)
        self._accepted = {i: (round, part) for i, round, part in state["accepted"]}
        self._numbers = {client: number for client, number in state["clients"]}
        self._retired = list(state["retired"])
        if given is None:
            self.classes = saved
            self._named_by = state["named_by"]
        self._round_started = False

    def save(self, folder: str | Path) -> None:
        """Writes `state_dict()` into a file in `folder`, in place of an earlier one.

        Save it after each round: a client keeps what it learnt as soon as a message
        tells it that its upload was used. Raises OSError where it cannot be written;
        then the earlier file stands.
        """
        write_state(folder, self._live_state())

    def restore(self, folder: str | Path) -> Server:
        """Loads the state that `save` wrote, and returns the server itself.

        Raises ValueError as `load_state_dict` does, and where the file is absent or
        damaged.
        """
        self.load_state_dict(read_state(folder))
        return self

    def _live_state(self) -> SideState:
        """The state as in `state_dict`, with the server's own tensors."""
        numbers = self._numbers.items()
        return {
            "identity": self._identity,
            "state": flatten_state(self._state),
            "report": self._report,
            "net": {"w0": self.net.w0, "b0": self.net.b0},
            "round": self._state.round,
            "void": self._state.void_rounds,
            "accepted": [[number, *fact] for number, fact in self._accepted.items()],
            "clients": [[_plain_id(client), number] for client, number in numbers],
            "retired": list(self._retired),
            "classes": self.classes and list(self.classes),
            "named_by": (None if self._named_by is None else _plain_id(self._named_by)),
        }

    @cached_property
    def _identity(self) -> Record:
        """The description by which a state tells servers apart."""
        return identity_of(
            "server",
            self.algorithm,
            self.net,
            self.averages,
            rounds=self.rounds,
            seed=self.seed,
            clip=self.clip,
        )

    def _cohort(
        self,
        ids: Sequence[int],
        num_samples: Sequence[int],
        round: int,
        purpose: str = "send",
    ) -> Cohort:
        """The cohort of these clients, for the algorithm's hooks."""
        clients = torch.tensor(ids)
        participated = self._state.participated
        return Cohort(
            clients,
            torch.tensor(num_samples),
            n=self.num_clients,
            round=round,
            rounds=self.rounds,
            seed=self.seed,
            purpose=purpose,
            training=self.training,
            new=~participated[clients],
            participated=participated,
        )

    def _try_round(
        self, uploads: Mapping[Any, Upload], names: Mapping[int, Any], strict: bool
    ) -> RoundOutcome:
        """Plays the round with these uploads if it can be played.

        Where it cannot be played, this raises ValueError if `strict`, and else returns
        a void outcome.

        Args:
            uploads: The uploads by the clients' ids.
            names: The client's id of each number.
        """

        def report_refused(bad: BadUpload) -> None:
            sentences = [
                f"client {names[number]!r}: {reason}"
                for number, reason in bad.reasons.items()
            ]
            if strict:
                raise RefusedUpload(sentences[0])
            for sentence in sentences:
                _raise_or_warn(sentence, strict)

        outcome = void = RoundOutcome(list(names), void=True)
        try:
            outcome = self._run_round([*uploads.values()], report_refused)
        except RefusedUpload:
            raise
        except Stop as stop:  # it ends a run, but a server waits for other uploads
            void.void_reason = str(stop)
            _raise_or_warn(f"uploads: {stop}", strict)
        except UNUSABLE_UPLOAD_ERRORS as error:
            # Where an earlier round was served, the error is a fault of the algorithm
            # and not of the uploads.
            if is_out_of_memory(error) or (strict and self._accepted):
                raise
            first = next(iter(uploads.values()))
            held = [f"{k} {describe_layout(v)}" for k, v in first.tensors.items()]
            void.void_reason = str(error).partition("\n")[0].rstrip(".")
            _raise_or_warn(
                f"uploads: {type(self.algorithm).__name__} cannot use what each holds, "
                f"{', '.join(held) or 'nothing'} ({void.void_reason}); give both sides "
                "one algorithm and model.",
                strict,
            )
        if not outcome.void:
            # The round is played, so an error in here is the method's, not an upload's.
            self._record_accepted(outcome)
        return outcome

    def _run_round(
        self, uploads: Sequence[Upload], on_refused: Callable[[BadUpload], None]
    ) -> RoundOutcome:
        """Plays the round with these uploads, of which there is one at least.

        Args:
            on_refused: Is called with the clients whose uploads are refused.
        """
        state = self._state
        alg = self.algorithm
        ids = [upload.number for upload in uploads]
        num_samples = [upload.num_samples for upload in uploads]
        cohort = self._cohort(ids, num_samples, state.round + 1)
        first = uploads[0].tensors
        up = {}
        for key in first:
            up[key] = torch.stack([upload.tensors[key] for upload in uploads])
        buffers = up.pop(BUFFERS_KEY, state.buffers[cohort.ids])
        # The root of a negative variance would be NaN in every client's model, so the
        # upload counts as not finite.
        negative = (buffers[:, self.net.variances] < 0).any(1)
        buffers[negative] = torch.nan
        down = alg.send(state.server, cohort)
        # Clients upload neither their own state nor their loss.
        rows = CohortRows({}, buffers, up=up)
        result = CohortResult(cohort, down, {}, rows)
        result, outcome = accept(
            result,
            alg,
            state.server,
            variances=self.net.variances,
            clip=self.clip,
            sends_buffers=self.averages,
            on_refused=on_refused,
        )
        changes = serve(alg, state, result, outcome, self.averages, on_refused)
        if not outcome.void:
            self._state = commit(state, changes, outcome)
        return outcome

    def _record_accepted(self, outcome: RoundOutcome) -> None:
        """Stores the facts of a round for later downloads and for `report`."""
        cohort = outcome.cohort
        assert cohort is not None
        factor = outcome.clip_factor
        if factor is None:
            factor = torch.ones(len(cohort.ids))
        for number, part in zip(cohort.ids.tolist(), factor.tolist(), strict=True):
            self._accepted[number] = (self.round, part)
        self._report = self.algorithm.report(self._state.server, outcome.mix, cohort)

    def _read_uploads(
        self, uploads: Mapping[Any, tuple[Tensors, int]], strict: bool
    ) -> dict[Any, Upload]:
        """The uploads that fit, by the clients' ids, ascending by their numbers."""
        expected = self._expected_uploads()
        read: dict[Any, Upload] = {}
        for client, upload in uploads.items():
            try:
                read[client] = self._read_upload(client, upload, expected)
            except ValueError as error:
                _raise_or_warn(str(error), strict)
        ordered = dict(sorted(read.items(), key=lambda item: item[1].number))
        return self._with_these_classes(ordered, strict)

    def _with_these_classes(
        self, uploads: dict[Any, Upload], strict: bool
    ) -> dict[Any, Upload]:
        """The uploads of clients whose classes have the names of this server's."""
        names = self.classes
        named_by = self._named_by
        fitting = {}
        for client, upload in uploads.items():
            given = upload.class_names
            if given is None or given == names:
                fitting[client] = upload
                continue
            # An upload that is not finite will be left out, and names nothing.
            counts = all(bool(t.isfinite().all()) for t in upload.tensors.values())
            if names is None and counts:
                names = given
                named_by = client
            if names is None or given == names or not counts:
                fitting[client] = upload
                continue
            source = "" if named_by is None else f", those of client {named_by!r}"
            _raise_or_warn(
                f"client {client!r}: its classes are {', '.join(given)}, "
                f"expected {', '.join(names)}{source}; read its data with classes=, or "
                "give Server(classes=) the right names.",
                strict,
            )
        return fitting

    def _expected_uploads(self) -> Tensors:
        """Tensors [...] of the shapes and dtypes of a client's upload, by name."""
        any_client = 0
        cohort = self._cohort([any_client], [1], self.round + 1)
        state = self._state.server
        down = self.algorithm.send(state, cohort)
        expected: Tensors = {}
        for key, value in self.algorithm.uploads(state, down, cohort).items():
            expected[key] = value.like if isinstance(value, Claim) else value
        if self.averages:
            expected[BUFFERS_KEY] = self.net.b0
        return expected

    def _read_upload(self, client: Any, upload: Any, expected: Tensors) -> Upload:
        """One client's upload, in the dtypes of the tensors that are expected.

        Raises ValueError where it does not fit.
        """
        name = f"client {client!r}"
        known = list(self._numbers)
        is_known = client in self._numbers
        require(is_known, name, "one of those who have downloaded", known)
        is_pair = isinstance(upload, tuple) and len(upload) == 2
        require(is_pair, name, "(upload, number of samples)", upload)
        message, num_samples = upload
        tensors, header = open_message(message, self._fingerprint, name)
        number = self._numbers[client]
        round = self.round + 1
        if header.number != number or header.round != round:
            raise ValueError(
                f"{name}: its upload is that of client number {header.number} for "
                f"round {header.round}, expected that of number {number} for round "
                f"{round}; leave it out."
            )
        is_whole = isinstance(num_samples, Integral)
        is_whole = is_whole and not isinstance(num_samples, bool)
        fits = is_whole and 1 <= int(num_samples) <= MAX_SAMPLES
        wanted = f"a whole number from 1 to {MAX_SAMPLES}"
        require(fits, f"{name}, number of samples", wanted, num_samples)
        class_names = None
        if CLASSES_KEY in tensors:
            class_names = decode_class_names(tensors.pop(CLASSES_KEY), name)
        fitting = _fit_upload(tensors, expected, name)
        device = self.net.w0.device
        fitting = {key: value.to(device) for key, value in fitting.items()}
        return Upload(number, fitting, int(num_samples), class_names)


def _fit_upload(tensors: Tensors, expected: Tensors, name: str) -> Tensors:
    """The tensors of an upload, in the order and the dtypes of those that are expected.

    Raises ValueError where they are others.

    Args:
        tensors: The tensors [...] that came.
        expected: Tensors [...] of the shapes and dtypes of an upload.
        name: The words that begin an error's sentence.
    """
    remedy = "send all tensors that the client's train made"
    names = ", ".join(map(repr, expected)) or "nothing"
    for key in tensors:
        if key not in expected:
            further = "the algorithm's hook uploads names all that train may upload"
            reject(name, f"{names} in its upload", key, remedy=further)
    fitting = {}
    for key, like in expected.items():
        where = f"{name}, {key!r}"
        if key not in tensors:
            reject(where, describe_layout(like), Words("none"), remedy=remedy)
        fitting[key] = convert(tensors[key], like, where)
    return fitting


def _plain_id(client: Hashable) -> str | int:
    """A client's id as a string or an int, without classes such as NumPy's."""
    return client if isinstance(client, str) else int(client)  # type: ignore[call-overload, no-any-return]


class RefusedUpload(ValueError):
    """An upload of a strict round that the algorithm refuses."""


def _raise_or_warn(sentence: str, strict: bool) -> None:
    """Raises ValueError if `strict`, and else warns."""
    if strict:
        raise ValueError(sentence)
    warn_caller(sentence, RuntimeWarning)
