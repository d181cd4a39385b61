"""Both halves of a round on machines of their own, for every algorithm: the `Server`,
whose clients are wherever they are, come and go; the `Client`, what it keeps, its work
of a round, its personalized model; and what travels between them, dicts of plain
tensors, which any framework carries.
"""

import warnings
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
from pflcore.simulation._uploads import (
    CohortResult,
    RoundOutcome,
    accept,
    finite_rows,
    shrink_towards,
)
from pflcore.simulation.round import (
    batch_norm_policy,
    check_state,
    commit,
    flatten_state,
    initial_state,
    serve,
    unflatten_state,
)
from pflcore.train import Clients, Net, Training
from pflcore.train._gpu_flags import REPEATABLE_FLAGS
from pflcore.train._losses import Loss, default_loss
from pflcore.train._memory import is_out_of_memory
from pflcore.train._select_engine import make_context
from pflcore.train._workers import single_threaded

HEADER_KEY = "@about"
BUFFERS_KEY = "@statistics"  # beside the algorithm's own keys


class MessageHeader(NamedTuple):
    """The numbers of a message, in float64: whole numbers below 2**53, and a factor."""

    number: int  # the client's, from 0
    n: int  # N
    fingerprint: int
    round: int  # from 1, the one that the message is for
    rounds: int  # R
    done: int  # rounds that the server has finished
    accepted: int  # the last of them that the client's upload was part of; 0: none
    # how much of that upload the server took: below 1 where its `clip` shortened it
    factor: float


def fingerprint(algorithm: Algorithm, net: Net, averages: bool) -> int:
    """What both sides must have alike, as a number: the algorithm's name, the model's
    shapes and what becomes of batch norm's statistics."""
    parts = name_of(algorithm), str(net.dtype), net.shapes, net.buffer_shapes, averages
    return zlib.crc32(repr(parts).encode())


def prepare_net(algorithm: Algorithm, model: Model, loss: Loss, seed: int) -> Net:
    """The model as the algorithm trains it."""
    return algorithm.prepare(
        model if isinstance(model, Net) else Net(model, loss, seed=seed)
    )


def encode_message(
    payload: Payload, about: MessageHeader, statistics: Tensor | None
) -> Tensors:
    """The message of one client, of the slices [1, ...] of a payload; of pools the rows
    that are sent."""
    message: Tensors = {HEADER_KEY: torch.tensor(about, dtype=torch.float64)}
    if statistics is not None:
        message[BUFFERS_KEY] = statistics.clone()
    for key, value in payload.items():
        if isinstance(value, SharedRows):
            sent = torch.zeros(
                len(value.rows), dtype=torch.bool, device=value.rows.device
            )
            sent[value.index[value.index >= 0]] = True
            message |= {f"{key}@rows": value.rows[sent], f"{key}@sent": sent}
            value = value.index
            key = f"{key}@index"
        message[key] = value[0].clone()
    return message


MAX_CLIENTS = 2**24  # of one federation: both sides hold some numbers of each
NOT_A_MESSAGE_TEXT = "{}: expected a dict of dense tensors as the other side made it."


class DownloadLayout(NamedTuple):
    """What an algorithm sends, as its first message shows it."""

    model_layouts: Mapping[str, tuple[int, torch.dtype]]  # of each model its numbers
    # of each pool its models, that are sent or not
    shared_row_counts: Mapping[str, int]


def download_layout(algorithm: Algorithm, net: Net) -> DownloadLayout | None:
    """What the server sends; None where an algorithm of one's own does not show it
    here."""
    n = max(algorithm.traits.required_clients, default=0) + 2
    sizes = {net.size}
    try:
        sizes |= {
            v.shape[-1] for v in algorithm.server_init_args(net).values() if v.dim()
        }
        server = initial_state(algorithm, net, n, clients=False).server
        down = algorithm.send(server, Cohort(torch.tensor([0]), torch.tensor([1]), n))
    except Exception:
        # it may need another number of clients, or what a server alone has
        return None
    rows = {k: v.rows if isinstance(v, SharedRows) else v for k, v in down.items()}
    models = {
        k: (v.shape[-1], v.dtype) for k, v in rows.items() if v.shape[-1] in sizes
    }
    pools = {k: len(v.rows) for k, v in down.items() if isinstance(v, SharedRows)}
    return DownloadLayout(models, pools)


def parse_header(numbers: Tensor) -> MessageHeader:
    """The numbers of a message. ValueError where no message has them."""
    *whole, factor = numbers.tolist()
    about = MessageHeader._make([*map(int, whole), factor])
    known = (
        0 <= about.number < about.n <= MAX_CLIENTS
        and min(about.round, about.rounds) >= 1
    )
    told = 0 <= about.accepted <= about.done and 0 <= factor <= 1
    if not known or not told or list(about[:-1]) != whole:
        raise ValueError
    return about


def is_complete_tensor(value: Tensor) -> bool:
    """Whether a tensor is dense, and holds all the numbers that its shape tells of."""
    if value.layout is not torch.strided or value.is_nested:
        return False
    return value.numel() * value.element_size() <= value.untyped_storage().nbytes()


def check_model_layouts(message: Tensors, layout: DownloadLayout, name: str) -> None:
    """ValueError where a model of a message is not as long as the models here."""
    for key, (size, dtype) in layout.model_layouts.items():
        row = message.get(f"{key}@rows" if key in layout.shared_row_counts else key)
        fits = row is None or (
            row.dim() and row.shape[-1] == size and row.dtype == dtype
        )
        require(
            fits,
            f"{name}, {key!r}",
            f"{size} numbers of {dtype}, as the model here has",
            row,
        )


def expand_shared_rows(
    sent_rows: Tensor, sent_mask: Tensor, index: Tensor, max_rows: int | None
) -> SharedRows:
    """The pool whose rows where `sent_mask`, bool [R], is true are `sent_rows`; the
    others take no memory. ValueError where these are no parts of one, or it has more
    rows than `max_rows`."""
    fits = sent_mask.dtype == torch.bool and len(sent_rows) == int(sent_mask.sum())
    low, high = (int(v) for v in index.aminmax()) if index.numel() else (-1, -1)
    if (
        not fits
        or not -1 <= low <= high < len(sent_mask)
        or (max_rows is not None and len(sent_mask) > max_rows)
    ):
        raise ValueError
    rows = lazy_zeros(
        len(sent_mask),
        sent_rows[0] if len(sent_rows) else sent_rows.new_empty(sent_rows.shape[1:]),
    )
    rows[sent_mask] = sent_rows  # a row's number may be a client's
    return SharedRows(rows, index[None])


def decode_message(
    message: Any,
    device: torch.device,
    alike: int,
    what: str,
    layout: DownloadLayout | None = None,
) -> tuple[Payload, MessageHeader, Tensor | None]:
    """The payload [1, ...] of a message, its numbers and the statistics [b] that came
    with it, on `device`.

    ValueError where it is no message, its fingerprint is not `alike`, or it does not
    fit `layout` (None: whatever an algorithm may send): before anything larger than the
    message is made.
    """
    try:
        tensors = {k: v.detach() for k, v in message.items()}
        whole = all(map(is_complete_tensor, tensors.values()))
        about = parse_header(tensors.pop(HEADER_KEY))
        pools = {k.removesuffix("@rows") for k in tensors if k.endswith("@rows")}
    except Exception:  # of what somebody else made
        whole = False
    if not whole:
        raise ValueError(NOT_A_MESSAGE_TEXT.format(what))
    if about.fingerprint != alike:
        raise ValueError(
            f"{what}: it is of another algorithm, model or `batch_norm` than those "
            "that are played "
            "here; give both sides the same."
        )
    if layout is not None:
        check_model_layouts(tensors, layout, what)
    try:
        tensors = {k: v.to(device) for k, v in tensors.items()}
        statistics = tensors.pop(BUFFERS_KEY, None)
        payload: Payload = {k: v[None] for k, v in tensors.items() if "@" not in k}
        for key in pools if layout is None else pools & {*layout.shared_row_counts}:
            few, mask, index = (
                tensors.pop(f"{key}@{part}") for part in ("rows", "sent", "index")
            )
            # every client may have an own list of everybody's
            most = (
                None
                if layout is None
                else max(about.n, layout.shared_row_counts[key]) * about.n
            )
            payload[key] = expand_shared_rows(few, mask, index, most)
        foreign = [k for k in tensors if "@" in k]
    except Exception:
        foreign = [what]
    if foreign:
        raise ValueError(NOT_A_MESSAGE_TEXT.format(what))
    return payload, about, statistics


class Download(dict[str, Any]):
    """What was sent [1, ...], by its keys; ValueError for one that was not."""

    def __missing__(self, key: str) -> Any:
        names = ", ".join(self) or "nothing"
        raise ValueError(
            f"download: expected {key!r} in it, got {names}; ask for another."
        )


ClientCount = Annotated[int, at.Interval(ge=1, le=MAX_CLIENTS)]
MAX_SAMPLES = 2**40  # of one client; the sum over clients is a whole number of 64 bits
SAVED_FIELDS = "accepted", "numbers", "retired", "report"  # beside the state
UploadLayout = dict[str, tuple[torch.Size, torch.dtype]]
Upload = tuple[int, Tensors, int]  # whose, what, of how many samples


class Server:
    """The server's half of a round, for every algorithm: `download` for each client,
    `aggregate` for those who answered.

    `template` is the model (an `nn.Module`, a function that makes one, or a `Net`),
    `rounds` how many there will be (for schedules). A client is called by any string or
    whole number; it is numbered when it is first seen: 0 to num_clients - 1 are
    themselves (so is an algorithm's `target`), others take the first free one, and
    beyond `num_clients` the state grows by a client, between rounds. With `Client`s of
    the same model, seed and training it gives what `Simulation` gives. `batch_norm`: as
    there; `clip`: as in `Robustness`.
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
        self.averages = (
            batch_norm_policy(self.algorithm, self.net, batch_norm) == "average"
        )
        self._state = initial_state(
            self.algorithm, self.net, num_clients, clients=False
        )
        self._fingerprint = fingerprint(self.algorithm, self.net, self.averages)
        # `accepted` and `factor` of `MessageHeader`
        self._accepted: dict[int, tuple[int, float]] = {}
        self._numbers: dict[Hashable, int] = {}
        self._retired: list[int] = []  # numbers that nobody gets again
        self._report: Tensors = {}
        # of the last round's uploads, of as many clients
        self._form: UploadLayout | None = None
        # has somebody been given what this round trains on?
        self._round_started = False

    @property
    def round(self) -> int:
        """How many rounds have been played."""
        return self._state.round

    @property
    def clients(self) -> dict[Hashable, int]:
        """The clients that are known, and their numbers in what `report` gives."""
        return dict(self._numbers)

    @property
    def num_clients(self) -> int:
        """How many clients the state is of."""
        return len(self._state.participated)

    @checked
    def download(
        self, client_id: Hashable, purpose: Literal["train", "evaluation"] = "train"
    ) -> Tensors:
        """What a client needs for the round that comes ("train"), or for its model as
        it is now ("evaluation"): a dict of tensors."""
        number = self.join(client_id)
        done = self.round
        train = purpose == "train"
        self._round_started |= train
        round, draws = (done + 1, "send") if train else (max(1, done), purpose)
        cohort = self._cohort([number], [1], round, draws)
        taken = self._accepted.get(number, (0, 1.0))
        both = self.num_clients, self._fingerprint
        about = MessageHeader(number, *both, round, self.rounds, done, *taken)
        statistics = self._state.buffers[number] if self.averages else None
        return encode_message(
            self.algorithm.send(self._state.server, cohort), about, statistics
        )

    def aggregate(
        self, uploads: Mapping[Any, tuple[Tensors, int]], strict: bool = True
    ) -> RoundOutcome:
        """Ends a round with what `Client.train` gave: {client id: (upload, number of
        training samples)}.

        Who is not there was absent. Says what happened: `dropped` (clients whose upload
        is not finite, or of no use: they were absent too), `void` (then nothing
        changed, for the reason `void_reason`), `relative_update_norm`, `clipped`.
        ValueError in one sentence, and nothing changed, for an upload that does not
        fit, where there is none, and where the algorithm would end a run; without
        `strict` an upload is left out with a RuntimeWarning, and a round of none is
        void.
        """
        wanted = "{client id: (upload, number of samples)} of at least one client"
        some = isinstance(uploads, Mapping) and (uploads or not strict)
        require(some, "uploads", wanted, uploads)
        read = self._read_uploads(uploads, strict)
        names = {number: client for client, (number, _, _) in read.items()}
        absent = set(self.algorithm.traits.required_clients) - set(names)
        if absent:
            said = (
                f"the target, client number {min(absent)}, must take part in every "
                "round."
            )
            _raise_or_warn(f"uploads: {said}", strict)
        outcome = RoundOutcome(list(names), void=True)
        if read and not absent:
            outcome = self._try_round(read, names, strict)
        if outcome.void:
            self._state = commit(self._state, {})
        self._round_started = False
        lists = {
            k: [names[i] for i in getattr(outcome, k)]
            for k in ("ids", "dropped", "clipped")
        }
        return replace(outcome, **lists)  # type: ignore[arg-type]

    def join(self, client_id: Hashable) -> int:
        """A client's number; a new one's first `download` does the same. ValueError
        where a round that has begun would have to grow."""
        named = isinstance(client_id, str | Integral) and not isinstance(
            client_id, bool
        )
        require(named, "client_id", "a string or a whole number", client_id)
        if client_id in self._numbers:
            return self._numbers[client_id]
        n = self.num_clients
        taken = {*self._numbers.values(), *self._retired}
        number = next((i for i in range(n) if i not in taken), n)
        if (
            isinstance(client_id, Integral)
            and 0 <= client_id < n
            and client_id not in taken
        ):
            number = int(client_id)
        if number == n:
            who = f"client {client_id!r}"
            require(
                not self._round_started,
                who,
                f"no newcomer in a round begun with {n} clients",
                "one",
            )
            self._state, _ = with_new_client(self.algorithm, self._state, self.net, n)
            self._form = None
        self._numbers[client_id] = number
        return number

    def leave(self, client_id: Hashable) -> None:
        """Forgets who has a number, for good: a later client of this id is a newcomer.
        What the method holds of it, stays."""
        self._retired.append(self._numbers.pop(client_id))

    def report(self) -> Tensors:
        """The algorithm's own report of the last round: mixing weights, clusters, ...,
        by the clients' numbers."""
        return self._report

    def state_dict(self) -> dict[str, Any]:
        """Everything that changes, in tensors of its own, numbers, strings and dicts,
        as `torch.save` and `torch.load` take it."""
        return {
            "fingerprint": self._fingerprint,
            "state": {k: v.clone() for k, v in flatten_state(self._state).items()},
            "round": self._state.round,
            "void": self._state.void_rounds,
            **{k: copy(getattr(self, f"_{k}")) for k in SAVED_FIELDS},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` gave. ValueError, and nothing changed, where
        it is another algorithm's or another model's."""
        if (
            not isinstance(state, Mapping)
            or state.get("fingerprint") != self._fingerprint
        ):
            raise ValueError(
                "state: expected what state_dict() of a Server of this algorithm and "
                "model gives."
            )
        tensors = {k: v.clone() for k, v in state["state"].items()}
        new = unflatten_state(tensors, state["round"], state["void"])
        check_state(new, self.algorithm, self.net, len(new.participated))
        self._state = new
        self._form = None
        self._round_started = False
        for key in SAVED_FIELDS:
            setattr(self, f"_{key}", copy(state[key]))

    # inside -------------------------------------------------------------------
    def _cohort(
        self, ids: Sequence[int], size: Sequence[int], round: int, purpose: str = "send"
    ) -> Cohort:
        who = torch.tensor(ids)
        sizes = torch.tensor(size)
        return Cohort(
            who, sizes, self.num_clients, round, self.rounds, self.seed, 0, purpose
        )

    def _try_round(
        self, uploads: Mapping[Any, Upload], names: Mapping[int, Any], strict: bool
    ) -> RoundOutcome:
        """The round with what was read; where it cannot be played, ValueError, or not
        `strict` a void one."""

        def report_refused(bad: BadUpload) -> None:
            said = [
                f"client {names[number]!r}: {why}"
                for number, why in bad.reasons.items()
            ]
            if strict:
                raise RefusedUpload(said[0])
            for words in said:
                _raise_or_warn(words, strict)

        void = RoundOutcome(list(names), void=True)
        try:
            ids, each, sizes = zip(*uploads.values(), strict=True)
            return self._run_round(ids, each, sizes, report_refused)
        except RefusedUpload:
            raise
        except Stop as stop:  # a server goes on where a run would end
            void.void_reason = str(stop)
            _raise_or_warn(f"uploads: {stop}", strict)
        except (
            ArithmeticError,
            LookupError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            if is_out_of_memory(error) or (strict and self._form is not None):
                raise
            form = _describe_layout(layout_of(next(iter(uploads.values()))[1]))
            void.void_reason = str(error).partition("\n")[0].rstrip(".")
            said = (
                f"uploads: {type(self.algorithm).__name__} cannot use what each "
                f"holds, {form}"
            )
            _raise_or_warn(
                f"{said} ({void.void_reason}); give both sides one algorithm and "
                "model.",
                strict,
            )
        return void

    def _run_round(
        self,
        ids: Sequence[int],
        uploads: Sequence[Tensors],
        sizes: Sequence[int],
        on_refused: Callable[[BadUpload], None],
    ) -> RoundOutcome:
        """The round with these uploads, which have one form; `on_refused` hears of
        those that the algorithm cannot use."""
        state = self._state
        alg = self.algorithm
        up = {k: torch.stack([one[k] for one in uploads]) for k in uploads[0]}
        cohort = self._cohort(ids, sizes, state.round + 1)
        statistics = up.pop(BUFFERS_KEY, state.buffers[cohort.ids])
        negative = (statistics[:, self.net.variances] < 0).any(1)
        # no variance, and everybody's square root of it is NaN
        statistics[negative] = torch.nan
        none = torch.zeros(len(ids))
        trained = CohortResult(
            cohort, alg.send(state.server, cohort), up, {}, {}, statistics, none
        )
        trained, outcome = accept(trained, alg.traits, state.server, self.clip)
        changes = serve(alg, state, trained, outcome, self.averages, on_refused)
        if not outcome.void:
            self._state, self._form = commit(state, changes), layout_of(uploads[0])
            taken = outcome.cohort or cohort
            factor = (
                torch.ones(len(taken.ids))
                if outcome.clip_factor is None
                else outcome.clip_factor
            )
            pairs = zip(taken.ids.tolist(), factor.tolist(), strict=True)
            self._accepted |= {number: (self.round, mine) for number, mine in pairs}
            self._report = alg.report(self._state.server, outcome.mix, taken)
        return replace(outcome, train_loss=None)

    def _read_uploads(
        self, uploads: Mapping[Any, tuple[Tensors, int]], strict: bool
    ) -> dict[Any, Upload]:
        """The round's uploads that have one form, by clients, ascending by number."""
        read: dict[Any, Upload] = {}
        for client, given in uploads.items():
            try:
                read[client] = self._upload(client, given)
            except ValueError as error:
                _raise_or_warn(str(error), strict)
        forms = {client: layout_of(up) for client, (_, up, _) in read.items()}
        each = list(forms.values())
        # at first, what most sent
        form = self._form or max(each, key=each.count, default={})
        form = form | layout_of({BUFFERS_KEY: self.net.b0} if self.averages else {})
        for client, mine in forms.items():
            if mine != form:
                said = (
                    f"its upload holds {_describe_layout(mine)}, expected "
                    f"{_describe_layout(form)}."
                )
                _raise_or_warn(f"client {client!r}: {said}", strict)
                del read[client]
        return dict(sorted(read.items(), key=lambda item: item[1][0]))

    def _upload(self, client: Any, given: Any) -> Upload:
        """One client's upload, checked."""
        who = f"client {client!r}"
        require(
            client in self._numbers,
            who,
            "one of those who have downloaded",
            list(self._numbers),
        )
        whole = isinstance(given, tuple) and len(given) == 2
        require(whole, who, "(upload, number of samples)", given)
        # of whole rows there is one a client
        device = self.net.w0.device
        nothing = DownloadLayout({}, {})
        payload, about, statistics = decode_message(
            given[0], device, self._fingerprint, who, nothing
        )
        number = self._numbers[client]
        size = given[1]
        mine = number, self.round + 1
        if (about.number, about.round) != mine:
            raise ValueError(
                f"{who}: its upload is number {about.number}'s of round {about.round}, "
                "expected "
                f"{mine[0]}'s of round {mine[1]}; leave it out."
            )
        counted = isinstance(size, Integral) and not isinstance(size, bool)
        some = counted and 1 <= int(size) <= MAX_SAMPLES
        require(
            some,
            f"{who}, number of samples",
            f"a whole number from 1 to {MAX_SAMPLES}",
            size,
        )
        up = {k: v[0] for k, v in payload.items()}
        return (
            number,
            up | ({} if statistics is None else {BUFFERS_KEY: statistics}),
            int(size),
        )


class RefusedUpload(ValueError):
    """Ends a strict round: an algorithm cannot use an upload."""


def _raise_or_warn(said: str, strict: bool) -> None:
    if strict:
        raise ValueError(said)
    warnings.warn(said, RuntimeWarning, stacklevel=4)


def layout_of(up: Tensors) -> UploadLayout:
    return {k: (v.shape, v.dtype) for k, v in up.items()}


def _describe_layout(form: UploadLayout) -> str:
    each = [
        f"{k} {list(shape)} {str(t).removeprefix('torch.')}"
        for k, (shape, t) in form.items()
    ]
    return ", ".join(each) or "nothing"


class Client:
    """One client's half of a round, for every algorithm: `train` on what
    `Server.download` gave, `model` for its personalized model.

    `model` must start as the server's template does (the same weights, or the same
    function and `seed`). `data`: (x, y), {"train": (x, y), "val": ...}, a Dataset or a
    Federation of one client (one that was standardized gives a personalized model that
    takes raw features all the same). What the algorithm keeps at a client stays here,
    batch norm's statistics too unless they are averaged; a round that the server did
    not take this client's upload in, leaves no trace.
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
        one = single_client_federation(data, dtype=None)
        device = device_of(hardware.device)
        net = prepare_net(self.algorithm, model, loss or default_loss(one.y), seed).to(
            device
        )
        x, y = (t.to(net.dtype) if t.is_floating_point() else t for t in (one.x, one.y))
        one = mask_ignored_label(replace(one, x=x, y=y).to(device), net.ignored_label)
        self.data = (
            with_validation(one, seed) if self.algorithm.traits.needs_val else one
        )
        self.averages = batch_norm_policy(self.algorithm, net, batch_norm) == "average"
        where = (hardware.engine, hardware.workers, seed)
        self._context = make_context(
            net, self.data, training, *where, graphs=hardware.graphs
        )
        net = self._context.net
        classes = self.data.classes
        if (
            classes is not None
            and self.data.relabel is None
            and net.head_name is not None
        ):
            # one client may not have samples of all classes
            self.data = replace(self.data, classes=max(classes, net.classes))
        self._fingerprint = fingerprint(self.algorithm, net, self.averages)
        self._download_layout = download_layout(self.algorithm, net)
        self._buffers = net.b0[None]  # [1, b]
        self._client_state: Tensors = {}  # [1, ...]
        # a round, and what became of state and statistics in it, until the server says
        # whether it took the upload
        self._pending: tuple[int, Tensors, Tensor] | None = None

    def train(self, download: Mapping[str, Tensor]) -> tuple[Tensors, int]:
        """This client's work of a round: its upload, a dict of tensors [1, ...], and
        its number of training samples, for `Server.aggregate`."""
        with self._reproducible():
            down, own, about, clients = self._open_download(download)
            if about.round != about.done + 1:
                raise ValueError(
                    "download: expected one to train on, got one for an evaluation; "
                    "ask for "
                    "download(client_id)."
                )
            new, up, fit = self.algorithm.train(down, own, clients)
        self._client_state, self._pending = own, (about.round, own | new, fit.buffers)
        # so that the server drops it
        if not finite_rows([*new.values(), fit.buffers], 1).all():
            up = {
                k: v * torch.nan if v.is_floating_point() else v for k, v in up.items()
            }
        statistics = fit.buffers[0] if self.averages else None
        return encode_message(up, about, statistics), int(clients.num_samples[0])

    def model(self, download: Mapping[str, Tensor]) -> Personalized:
        """The personalized model, from `Server.download(client_id, "evaluation")`, a
        dict of tensors [1, ...]. It takes raw features, also where this client's were
        standardized."""
        model, clients = self._personalized(download)
        row = {k: v[0] for k, v in model.items()}
        about = client_facts(self.data, 0)
        return Personalized(
            self.algorithm, clients.net, row, clients.buffers[0], *about
        )

    def evaluate(
        self, download: Mapping[str, Tensor], split: str = "test"
    ) -> dict[str, float]:
        """The personalized model of a download [1, ...] on this client's own samples:
        "loss", for classes "accuracy", and "size", how many they are."""
        size = int(self.data.size(split)[0]) if split in self.data.index else 0
        if not size:
            raise ValueError(
                f"split: this client has no sample of {split!r} to be evaluated on; "
                "give it some "
                f"as data={{..., {split!r}: (x, y)}}."
            )
        model, clients = self._personalized(download)
        with self._reproducible():
            scores = clients.scores(model, split, self.algorithm.predict)
            returns = self.algorithm.traits.returns
            loss, accuracy = clients.loss_and_accuracy(scores, split, returns=returns)
        found = {"loss": float(loss), "size": size}
        return found if accuracy is None else {**found, "accuracy": float(accuracy)}

    def state_dict(self) -> dict[str, Any]:
        """What this client keeps between rounds, for `torch.save`."""
        return {
            "fingerprint": self._fingerprint,
            "own": dict(self._client_state),
            "statistics": self._buffers,
            "pending": self._pending,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` gave. ValueError, and nothing changed, where
        it is something else: another algorithm's, or of a model of other shapes."""
        if (
            not isinstance(state, Mapping)
            or state.get("fingerprint") != self._fingerprint
        ):
            raise ValueError(
                "state: expected what state_dict() of a Client of this algorithm and "
                "model gives."
            )
        self._client_state, self._buffers = dict(state["own"]), state["statistics"]
        self._pending = state["pending"]

    # inside -------------------------------------------------------------------
    @contextmanager
    def _reproducible(self) -> Iterator[None]:
        """This client's work is one thread's, and repeats its bits on a card."""
        with single_threaded(), REPEATABLE_FLAGS.set_for(self._context.net.w0.device):
            yield

    def _open_download(
        self, download: Any
    ) -> tuple[Payload, Tensors, MessageHeader, Clients]:
        """What was sent, this client's own state [1, ...], the message's numbers, and
        what a hook is given to train with, when the last round is settled."""
        net = self._context.net
        device = net.w0.device
        key = self._fingerprint
        payload, about, statistics = decode_message(
            download, device, key, "download", self._download_layout
        )
        came = None if statistics is None else (statistics.shape, statistics.dtype)
        wanted = (net.b0.shape, net.b0.dtype) if self.averages else None
        require(came == wanted, f"download, {BUFFERS_KEY!r}", summarize(wanted), came)
        down = Download(payload)
        self._settle(about)
        kept = self._client_state if about.accepted else {}
        first = {
            k: v[:1] for k, v in self.algorithm.init_client(down, net, about.n).items()
        }
        own = {
            k: embed_tensor(kept[k], v) if k in kept else v.clone()
            for k, v in first.items()
        }
        mine = self._buffers if statistics is None else statistics[None]
        data = single_client_view(self.data, about.number, about.n)
        context = self._context._replace(data=data, rounds=about.rounds)
        number = torch.tensor([about.number])
        return down, own, about, Clients(context, number, about.round, mine.clone())

    def _settle(self, about: MessageHeader) -> None:
        """The last round's work counts where the server took its upload, as far as
        it took it."""
        if self._pending is None or about.done < self._pending[0]:
            return
        round, own, statistics = self._pending
        if about.accepted == round:
            clipped = own.keys() & set(self.algorithm.traits.clipped_with_update)
            factor = torch.tensor([about.factor], dtype=torch.float64)
            own |= {
                k: shrink_towards(own[k], self._client_state[k], factor)
                for k in clipped
            }
            self._client_state = own
            self._buffers = statistics
        self._pending = None

    def _personalized(self, download: Any) -> tuple[Tensors, Clients]:
        """The model [1, ...] and the clients with the statistics of batch norm that
        go with it."""
        with self._reproducible():
            down, own, _, clients = self._open_download(download)
            model = dict(self.algorithm.model(down, own, clients))
        return model, replace(clients, buffers=model.pop("batch_norm", clients.buffers))


def single_client_view(one: Federation, number: int, n: int) -> Federation:
    """The federation of n clients as the client `number` sees it, who has data of its
    own only; its draws are those of its number."""
    index = {
        k: Ragged.from_single_list(rows[0], number, n) for k, rows in one.index.items()
    }
    relabel = None if one.relabel is None else one.relabel.expand(n, -1)
    return one._copy_with(index=index, relabel=relabel)
