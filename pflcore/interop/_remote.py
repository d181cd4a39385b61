"""Both halves of a round on machines of their own, for every algorithm.

- The `Server` sends downloads and aggregates uploads; its clients come and go.
- The `Client` keeps its state, works for a round, and has a personalized model.
- Messages travel between them: dicts of plain tensors, which any framework carries.

A message holds the tensors of an algorithm's payload by their keys, and beside them
the header ("@about") and, where they are averaged, batch norm's statistics
("@statistics"). Of `SharedRows` with the key "w" it holds three parts: the rows that
are sent ("w@rows"), a mask of these among all ("w@sent"), and the client's own index
("w@index").

Shapes: N clients of the federation, P numbers of a model, R shared rows, b numbers of
batch norm.
"""

import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from numbers import Integral
from typing import Annotated, Any, Literal, NamedTuple

import annotated_types as at
import torch
from torch import Tensor

from pflcore.algorithms import algorithm_of, name_of
from pflcore.algorithms._protocol import (
    Algorithm,
    BadUpload,
    Cohort,
    Payload,
    SharedRows,
    Stop,
    Tensors,
    check_training,
    lazy_zeros,
)
from pflcore.check import (
    BatchNormPolicy,
    Model,
    PositiveFloat,
    PositiveInt,
    Seed,
    checked,
    device_of,
    require,
    summarize,
    warn_caller,
)
from pflcore.data._federation import Federation
from pflcore.data._protocols import (
    mask_ignored_label,
    single_client_federation,
    with_validation,
)
from pflcore.data._ragged import Ragged
from pflcore.simulation._models import (
    Personalized,
    client_facts,
    embed_tensor,
    with_new_client,
)
from pflcore.simulation._settings import Hardware
from pflcore.simulation._state import (
    batch_norm_policy,
    check_state,
    flatten_state,
    initial_state,
    unflatten_state,
)
from pflcore.simulation._uploads import (
    CohortResult,
    RoundOutcome,
    accept,
    finite_rows,
    shrink_towards,
)
from pflcore.simulation.round import commit, serve
from pflcore.train import Clients, Net, Training
from pflcore.train._gpu_flags import REPEATABLE_FLAGS
from pflcore.train._losses import Loss, default_loss
from pflcore.train._memory import is_out_of_memory
from pflcore.train._select_engine import make_context
from pflcore.train._workers import single_threaded

HEADER_KEY = "@about"
BUFFERS_KEY = "@statistics"


class MessageHeader(NamedTuple):
    """The numbers of a message, in float64: whole numbers below 2**53, and a factor."""

    number: int  # the client's, from 0
    n: int  # N
    fingerprint: int
    round: int  # the round that the message is for, from 1
    rounds: int  # R
    done: int  # rounds that the server has finished
    accepted: int  # the last of them that used the client's upload; 0: none
    # how much of that upload the server took: below 1 where its `clip` shortened it
    factor: float


def fingerprint(algorithm: Algorithm, net: Net, averages: bool) -> int:
    """A number for what server and client must have in common.

    That is the algorithm's name, the model's dtype and shapes, and whether batch norm's
    statistics are averaged.
    """
    parts = name_of(algorithm), str(net.dtype), net.shapes, net.buffer_shapes, averages
    return zlib.crc32(repr(parts).encode())


def prepare_net(algorithm: Algorithm, model: Model, loss: Loss, seed: int) -> Net:
    """The model as the algorithm trains it."""
    net = model if isinstance(model, Net) else Net(model, loss, seed=seed)
    return algorithm.prepare(net)


def encode_message(
    payload: Payload, header: MessageHeader, buffers: Tensor | None
) -> Tensors:
    """The message of one client, from its slices [1, ...] of a payload.

    Of shared rows it holds only those that the client receives.
    """
    message: Tensors = {HEADER_KEY: torch.tensor(header, dtype=torch.float64)}
    if buffers is not None:
        message[BUFFERS_KEY] = buffers.clone()
    for key, value in payload.items():
        if isinstance(value, SharedRows):
            message |= _encode_shared_rows(key, value)
        else:
            message[key] = value[0].clone()
    return message


def _encode_shared_rows(key: str, shared: SharedRows) -> Tensors:
    """The parts of a message that hold the shared rows of one client."""
    count = len(shared.rows)
    sent = torch.zeros(count, dtype=torch.bool, device=shared.rows.device)
    sent[shared.index[shared.index >= 0]] = True
    return {
        f"{key}@rows": shared.rows[sent],
        f"{key}@sent": sent,
        f"{key}@index": shared.index[0].clone(),
    }


# Clients of one federation: both sides hold some numbers of each.
MAX_CLIENTS = 2**24
NOT_A_MESSAGE_TEXT = "{}: expected a dict of dense tensors as the other side made it."


class DownloadLayout(NamedTuple):
    """The layout of an algorithm's downloads, by the keys of the payload."""

    model_layouts: Mapping[str, tuple[int, torch.dtype]]  # numbers of each model
    # of each payload of shared rows their number, sent or not
    shared_row_counts: Mapping[str, int]


def download_layout(algorithm: Algorithm, net: Net) -> DownloadLayout | None:
    """The layout of the server's downloads.

    None where an algorithm of a user does not show it on this machine.
    """
    n = max(algorithm.traits.required_clients, default=0) + 2
    model_sizes = {net.size}
    try:
        for value in algorithm.server_init_args(net).values():
            if value.dim():
                model_sizes.add(value.shape[-1])
        server = initial_state(algorithm, net, n, clients=False).server
        cohort = Cohort(ids=torch.tensor([0]), num_samples=torch.tensor([1]), n=n)
        down = algorithm.send(server, cohort)
    except Exception:
        # It may need another number of clients, or what only a server has.
        return None
    model_layouts: dict[str, tuple[int, torch.dtype]] = {}
    shared_row_counts: dict[str, int] = {}
    for key, value in down.items():
        rows = value
        if isinstance(value, SharedRows):
            rows = value.rows
            shared_row_counts[key] = len(rows)
        if rows.shape[-1] in model_sizes:
            model_layouts[key] = (rows.shape[-1], rows.dtype)
    return DownloadLayout(model_layouts, shared_row_counts)


def parse_header(numbers: Tensor) -> MessageHeader:
    """The numbers of a message. Raises ValueError for numbers that no message has."""
    *whole_numbers, factor = numbers.tolist()
    header = MessageHeader._make([*map(int, whole_numbers), factor])
    are_whole = list(header[:-1]) == whole_numbers
    has_client = 0 <= header.number < header.n <= MAX_CLIENTS
    has_round = header.round >= 1 and header.rounds >= 1
    has_past = 0 <= header.accepted <= header.done and 0 <= factor <= 1
    if not (are_whole and has_client and has_round and has_past):
        raise ValueError
    return header


def is_complete_tensor(value: Tensor) -> bool:
    """True for a dense tensor that holds all the numbers that its shape promises."""
    if value.layout is not torch.strided or value.is_nested:
        return False
    return value.numel() * value.element_size() <= value.untyped_storage().nbytes()


def check_model_layouts(message: Tensors, layout: DownloadLayout, name: str) -> None:
    """Raises ValueError where a model of a message is no model of this client."""
    for key, (size, dtype) in layout.model_layouts.items():
        message_key = f"{key}@rows" if key in layout.shared_row_counts else key
        rows = message.get(message_key)
        if rows is None:
            continue
        fits = rows.dim() and rows.shape[-1] == size and rows.dtype == dtype
        wanted = f"{size} numbers of {dtype}, as the model here has"
        require(fits, f"{name}, {key!r}", wanted, rows)


def expand_shared_rows(
    sent_rows: Tensor,  # [R', P]
    sent: Tensor,  # bool [R]: the rows that travelled
    index: Tensor,  # [M]
    max_rows: int | None,
) -> SharedRows:
    """All R shared rows of a payload; rows that did not travel take no memory.

    Raises ValueError where the parts do not fit each other, or R exceeds `max_rows`.
    """
    count = len(sent)
    fits = sent.dtype == torch.bool and len(sent_rows) == int(sent.sum())
    low = -1
    high = -1
    if index.numel():
        low = int(index.min())
        high = int(index.max())
    has_rows = -1 <= low <= high < count
    is_too_long = max_rows is not None and count > max_rows
    if not fits or not has_rows or is_too_long:
        raise ValueError
    like = sent_rows[0] if len(sent_rows) else sent_rows.new_empty(sent_rows.shape[1:])
    rows = lazy_zeros(count, like)
    rows[sent] = sent_rows  # at the same places: a row's number may be a client's
    return SharedRows(rows, index[None])


def decode_message(
    message: Any,
    device: torch.device,
    own_fingerprint: int,
    name: str,
    layout: DownloadLayout | None = None,
) -> tuple[Payload, MessageHeader, Tensor | None]:
    """The payload [1, ...] of a message, its header and batch norm's statistics [b].

    The tensors are on `device`. Raises ValueError for what is no message, for one of
    another fingerprint, and for one that does not fit `layout` (None: whatever an
    algorithm may send). It raises before it makes anything larger than the message.
    """
    try:
        tensors, header = _read_tensors(message)
    except Exception:  # somebody else made the message: it may be anything
        raise ValueError(NOT_A_MESSAGE_TEXT.format(name)) from None
    if header.fingerprint != own_fingerprint:
        raise ValueError(
            f"{name}: it is of another algorithm, model or `batch_norm` than those "
            "that are played here; give both sides the same."
        )
    if layout is not None:
        check_model_layouts(tensors, layout, name)
    try:
        tensors = {key: value.to(device) for key, value in tensors.items()}
        buffers = tensors.pop(BUFFERS_KEY, None)
        payload = _read_payload(tensors, header.n, layout)
    except Exception:
        raise ValueError(NOT_A_MESSAGE_TEXT.format(name)) from None
    return payload, header, buffers


def _read_tensors(message: Any) -> tuple[Tensors, MessageHeader]:
    """The tensors of a message without its header, and the header."""
    tensors = {key: value.detach() for key, value in message.items()}
    if not all(map(is_complete_tensor, tensors.values())):
        raise ValueError
    header = parse_header(tensors.pop(HEADER_KEY))
    return tensors, header


def _read_payload(tensors: Tensors, n: int, layout: DownloadLayout | None) -> Payload:
    """The payload [1, ...] of the tensors of a message of n clients.

    Raises an error of some kind where they are no parts of one.
    """
    payload: Payload = {k: v[None] for k, v in tensors.items() if "@" not in k}
    parts = {k: v for k, v in tensors.items() if "@" in k}
    shared_keys = {k.removesuffix("@rows") for k in parts if k.endswith("@rows")}
    if layout is not None:
        shared_keys.intersection_update(layout.shared_row_counts)
    for key in shared_keys:
        sent_rows = parts.pop(f"{key}@rows")
        sent = parts.pop(f"{key}@sent")
        index = parts.pop(f"{key}@index")
        max_rows = None
        if layout is not None:
            # Each client may have a list of its own of all clients' rows.
            max_rows = max(n, layout.shared_row_counts[key]) * n
        payload[key] = expand_shared_rows(sent_rows, sent, index, max_rows)
    if parts:
        raise ValueError
    return payload


class Download(dict[str, Any]):
    """The payload [1, ...] that was sent. Raises ValueError for an absent key."""

    def __missing__(self, key: str) -> Any:
        names = ", ".join(self) or "nothing"
        raise ValueError(
            f"download: expected {key!r} in it, got {names}; ask for another."
        )


ClientCount = Annotated[int, at.Interval(ge=1, le=MAX_CLIENTS)]
# Samples of one client: the sum over clients is a whole number of 64 bits.
MAX_SAMPLES = 2**40
# Attributes of a server, without "_", that `state_dict` holds beside the state.
SAVED_FIELDS = "accepted", "numbers", "retired", "report"
# Errors by which an algorithm may answer to uploads that are not its own.
UNUSABLE_UPLOAD_ERRORS = (
    ArithmeticError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
UploadLayout = dict[str, tuple[torch.Size, torch.dtype]]


class Upload(NamedTuple):
    """One client's upload of a round."""

    number: int  # the client's
    tensors: Tensors
    num_samples: int  # of the client's training split


class Server:
    """The server's half of a round, for every algorithm.

    `download` makes what each client needs; `aggregate` ends the round with the uploads
    of the clients that answered. With `Client`s of the same model, seed and training
    options the results are those of `Simulation`.

    A client is called by any string or whole number, and receives a number when it is
    first seen. Whole numbers from 0 to num_clients - 1 keep theirs (so does an
    algorithm's `target`); other clients receive the first free number. Where none is
    free, the state grows by a client, between two rounds.

    Args:
        template: the model: an `nn.Module`, a function that makes one, or a `Net`.
        rounds: the number of rounds that there will be, for schedules.
        batch_norm: see `Simulation`.
        clip: see `Robustness`.
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
    ) -> None:
        self.algorithm = algorithm_of(algorithm)
        self.net = prepare_net(self.algorithm, template, "cross_entropy", seed)
        self.rounds = rounds
        self.seed = seed
        self.clip = clip
        policy = batch_norm_policy(self.algorithm, self.net, batch_norm)
        self.averages = policy == "average"
        self._state = initial_state(
            self.algorithm, self.net, num_clients, clients=False
        )
        self._fingerprint = fingerprint(self.algorithm, self.net, self.averages)
        # `accepted` and `factor` of `MessageHeader`
        self._accepted: dict[int, tuple[int, float]] = {}
        self._numbers: dict[Hashable, int] = {}
        self._retired: list[int] = []  # numbers that nobody gets again
        self._report: Tensors = {}
        # The layout of the last round's uploads, of a federation of this size.
        self._upload_layout: UploadLayout | None = None
        self._round_started = False  # True once a client may train for the next round

    @property
    def round(self) -> int:
        """The number of rounds that have been played."""
        return self._state.round

    @property
    def clients(self) -> dict[Hashable, int]:
        """The clients that are known, and their numbers in what `report` gives."""
        return dict(self._numbers)

    @property
    def num_clients(self) -> int:
        """The number of clients that the state has room for."""
        return len(self._state.participated)

    @checked
    def download(
        self, client_id: Hashable, purpose: Literal["train", "evaluation"] = "train"
    ) -> Tensors:
        """The tensors that one client needs, by name.

        They are for the coming round ("train"), or for its model as it is now
        ("evaluation").
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
            round=cohort.round,
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

        Clients that are not in `uploads` were absent. The outcome says what happened:

        - `dropped`: clients whose upload is not finite, or of no use to the algorithm.
          They count as absent.
        - `void`: nothing changed, for the reason `void_reason`.
        - `relative_update_norm` and `clipped`: how long the updates were.

        Raises ValueError, and changes nothing, for an upload that does not fit, where
        there is none, and where the algorithm would end a run. Without `strict` such an
        upload is left out with a RuntimeWarning, and a round without uploads is void.

        Args:
            uploads: {client id: (upload, number of training samples)}.
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
            self._state = commit(self._state, {})
        self._round_started = False
        return replace(
            outcome,
            ids=[names[i] for i in outcome.ids],
            dropped=[names[i] for i in outcome.dropped],
            clipped=[names[i] for i in outcome.clipped],
        )

    def join(self, client_id: Hashable) -> int:
        """The number of a client, which a new client receives here.

        A new client's first `download` does the same. Raises ValueError where a round
        that has begun would have to grow.
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
            wanted = f"no newcomer in a round begun with {n} clients"
            require(not self._round_started, f"client {client_id!r}", wanted, "one")
            self._state, _ = with_new_client(self.algorithm, self._state, self.net, n)
            self._upload_layout = None  # the uploads may be longer from now on
        self._numbers[client_id] = number
        return number

    def _free_number(self, client_id: Hashable) -> int:
        """A new client's number: its id, else the first one that is free, else N."""
        n = self.num_clients
        taken = {*self._numbers.values(), *self._retired}
        if isinstance(client_id, Integral) and 0 <= client_id < n:
            number = int(client_id)
            if number not in taken:
                return number
        return next((i for i in range(n) if i not in taken), n)

    def leave(self, client_id: Hashable) -> None:
        """Forgets a client for good: a later client of this id is a newcomer.

        What the algorithm holds of the client stays.
        """
        self._retired.append(self._numbers.pop(client_id))

    def report(self) -> Tensors:
        """The algorithm's own report of the last round, by the clients' numbers.

        It holds mixing weights, clusters, or what else the algorithm tells.
        """
        return self._report

    def state_dict(self) -> dict[str, Any]:
        """Everything that changes, for `torch.save`.

        It holds copies of tensors, numbers, strings and dicts, so `torch.load` needs no
        pickled classes.
        """
        return {
            "fingerprint": self._fingerprint,
            "state": {k: v.clone() for k, v in flatten_state(self._state).items()},
            "round": self._state.round,
            "void": self._state.void_rounds,
            **{k: copy(getattr(self, f"_{k}")) for k in SAVED_FIELDS},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from what `state_dict` returned.

        Raises ValueError, and changes nothing, where that is another algorithm's or
        another model's.
        """
        is_mapping = isinstance(state, Mapping)
        if not is_mapping or state.get("fingerprint") != self._fingerprint:
            raise ValueError(
                "state: expected what state_dict() of a Server of this algorithm and "
                "model gives."
            )
        tensors = {k: v.clone() for k, v in state["state"].items()}
        new = unflatten_state(tensors, state["round"], state["void"])
        check_state(new, self.algorithm, self.net, len(new.participated))
        self._state = new
        self._upload_layout = None
        self._round_started = False
        for key in SAVED_FIELDS:
            setattr(self, f"_{key}", copy(state[key]))

    # inside -------------------------------------------------------------------
    def _cohort(
        self,
        ids: Sequence[int],
        num_samples: Sequence[int],
        round: int,
        purpose: str = "send",
    ) -> Cohort:
        """The cohort of these clients, as the algorithm's hooks receive it."""
        return Cohort(
            torch.tensor(ids),
            torch.tensor(num_samples),
            n=self.num_clients,
            round=round,
            rounds=self.rounds,
            seed=self.seed,
            purpose=purpose,
        )

    def _try_round(
        self, uploads: Mapping[Any, Upload], names: Mapping[int, Any], strict: bool
    ) -> RoundOutcome:
        """Plays the round with these uploads.

        Where it cannot be played, raises ValueError, or returns a void outcome if not
        `strict`.
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

        void = RoundOutcome(list(names), void=True)
        try:
            return self._run_round([*uploads.values()], report_refused)
        except RefusedUpload:
            raise
        except Stop as stop:  # a server goes on where a run would end
            void.void_reason = str(stop)
            _raise_or_warn(f"uploads: {stop}", strict)
        except UNUSABLE_UPLOAD_ERRORS as error:
            # The layout of later rounds' uploads is known to be usable: then the error
            # is no fault of the uploads.
            is_usable_layout = self._upload_layout is not None
            if is_out_of_memory(error) or (strict and is_usable_layout):
                raise
            first = next(iter(uploads.values()))
            layout = _describe_layout(layout_of(first.tensors))
            void.void_reason = str(error).partition("\n")[0].rstrip(".")
            _raise_or_warn(
                f"uploads: {type(self.algorithm).__name__} cannot use what each holds, "
                f"{layout} ({void.void_reason}); give both sides one algorithm and "
                "model.",
                strict,
            )
        return void

    def _run_round(
        self, uploads: Sequence[Upload], on_refused: Callable[[BadUpload], None]
    ) -> RoundOutcome:
        """Plays the round with these uploads, which have one layout.

        Calls `on_refused` with the uploads that the algorithm cannot use.
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
        # A negative variance is none. Its root would be NaN in every client's model, so
        # the upload counts as not finite.
        negative = (buffers[:, self.net.variances] < 0).any(1)
        buffers[negative] = torch.nan
        down = alg.send(state.server, cohort)
        no_loss = torch.zeros(len(ids))  # clients do not upload theirs
        result = CohortResult(
            cohort,
            down,
            up,
            states_before={},
            client_states={},
            buffers=buffers,
            loss=no_loss,
        )
        result, outcome = accept(result, alg.traits, state.server, self.clip)
        changes = serve(alg, state, result, outcome, self.averages, on_refused)
        if not outcome.void:
            self._state = commit(state, changes)
            self._upload_layout = layout_of(first)
            self._record_accepted(outcome, outcome.cohort or cohort)
        return replace(outcome, train_loss=None)

    def _record_accepted(self, outcome: RoundOutcome, cohort: Cohort) -> None:
        """Keeps what later downloads and `report` tell of the round that was played."""
        factor = outcome.clip_factor
        if factor is None:
            factor = torch.ones(len(cohort.ids))
        for number, share in zip(cohort.ids.tolist(), factor.tolist(), strict=True):
            self._accepted[number] = (self.round, share)
        self._report = self.algorithm.report(self._state.server, outcome.mix, cohort)

    def _read_uploads(
        self, uploads: Mapping[Any, tuple[Tensors, int]], strict: bool
    ) -> dict[Any, Upload]:
        """The round's uploads of one layout, by client, ascending by number."""
        read: dict[Any, Upload] = {}
        for client, upload in uploads.items():
            try:
                read[client] = self._read_upload(client, upload)
            except ValueError as error:
                _raise_or_warn(str(error), strict)
        layouts = {client: layout_of(upload.tensors) for client, upload in read.items()}
        expected = self._expected_layout([*layouts.values()])
        for client, layout in layouts.items():
            if layout != expected:
                _raise_or_warn(
                    f"client {client!r}: its upload holds {_describe_layout(layout)}, "
                    f"expected {_describe_layout(expected)}.",
                    strict,
                )
                del read[client]
        return dict(sorted(read.items(), key=lambda item: item[1].number))

    def _expected_layout(self, layouts: list[UploadLayout]) -> UploadLayout:
        """The layout of the last round's uploads; at first that of most of these."""
        layout = self._upload_layout or max(layouts, key=layouts.count, default={})
        if self.averages:
            layout = layout | layout_of({BUFFERS_KEY: self.net.b0})
        return layout

    def _read_upload(self, client: Any, upload: Any) -> Upload:
        """One client's upload. Raises ValueError where it does not fit."""
        name = f"client {client!r}"
        known = list(self._numbers)
        is_known = client in self._numbers
        require(is_known, name, "one of those who have downloaded", known)
        is_pair = isinstance(upload, tuple) and len(upload) == 2
        require(is_pair, name, "(upload, number of samples)", upload)
        message, num_samples = upload
        # An upload has one row a client, and no shared rows.
        device = self.net.w0.device
        layout = DownloadLayout({}, {})
        payload, header, buffers = decode_message(
            message, device, self._fingerprint, name, layout
        )
        number = self._numbers[client]
        round = self.round + 1
        if header.number != number or header.round != round:
            raise ValueError(
                f"{name}: its upload is number {header.number}'s of round "
                f"{header.round}, expected {number}'s of round {round}; leave it out."
            )
        is_whole = isinstance(num_samples, Integral)
        is_whole = is_whole and not isinstance(num_samples, bool)
        fits = is_whole and 1 <= int(num_samples) <= MAX_SAMPLES
        wanted = f"a whole number from 1 to {MAX_SAMPLES}"
        require(fits, f"{name}, number of samples", wanted, num_samples)
        tensors = {key: value[0] for key, value in payload.items()}
        if buffers is not None:
            tensors[BUFFERS_KEY] = buffers
        return Upload(number, tensors, int(num_samples))


class RefusedUpload(ValueError):
    """Ends a strict round in which the algorithm cannot use an upload."""


def _raise_or_warn(sentence: str, strict: bool) -> None:
    """Raises ValueError, or warns if not `strict`."""
    if strict:
        raise ValueError(sentence)
    warn_caller(sentence, RuntimeWarning)


def layout_of(up: Tensors) -> UploadLayout:
    """Shape and dtype of each tensor of an upload."""
    return {key: (value.shape, value.dtype) for key, value in up.items()}


def _describe_layout(layout: UploadLayout) -> str:
    """A layout in words, such as "delta [10] float32"."""
    parts = [
        f"{key} {list(shape)} {str(dtype).removeprefix('torch.')}"
        for key, (shape, dtype) in layout.items()
    ]
    return ", ".join(parts) or "nothing"


def _spoil_upload(up: Tensors) -> Tensors:
    """The upload with NaN for every number, so that the server drops it."""
    return {
        key: value * torch.nan if value.is_floating_point() else value
        for key, value in up.items()
    }


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
