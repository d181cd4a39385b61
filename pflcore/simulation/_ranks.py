"""The processes, called ranks, that play one run together.

Something else starts them: torchrun, Slurm, Kubernetes or Ray Train. All ranks run the
same program and hold the same state. They talk by collectives of `torch.distributed`,
which every rank must call in the same order. Before rows travel, the ranks exchange one
small message each. So an error on one rank is raised on all of them, at the same place.

Symbols: S clients of a cohort, s of them on one rank, R ranks.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pflcore._device import to_device
from pflcore.algorithms._protocol import Stop
from pflcore.simulation._rows import map_rows
from pflcore.simulation._signals import allow_signals, defer_signals
from pflcore.simulation.callbacks import CallbackStop
from pflcore.train._memory import is_out_of_memory

T = TypeVar("T")


class RankError(RuntimeError):
    """Another rank of the run has failed, ended or fallen silent."""


class Failure(NamedTuple):
    """An error of one rank, as the others hear of it.

    Attributes:
        kind: The name of the error's class.
        text: The error's text.
        raises: The class that the other ranks raise.
    """

    kind: str
    text: str
    raises: type[BaseException]


class Message(NamedTuple):
    """The words of one rank in an exchange.

    Attributes:
        place: The place in the program at which the rank is.
        value: What it has to say.
        failure: The error that it came with, if any.
    """

    place: str
    value: Any
    failure: Failure | None


class Ranks:
    """The ranks of a run, as one of them sees them.

    With one rank nothing is exchanged, and every method returns at once.

    Attributes:
        rank: The number of this rank, from 0.
        count: The number of ranks, R.
        bytes_received: Bytes of rows that came from other ranks so far.
    """

    def __init__(
        self,
        rank: int = 0,
        count: int = 1,
        cpu_group: Any = None,
        card_group: Any = None,
    ) -> None:
        """Makes the ranks of process groups.

        Args:
            cpu_group: The group for messages, and for rows on the CPU.
            card_group: The group for rows on GPUs. None: they travel by way of the
                CPU, as where several ranks share a card.
        """
        self.rank = rank
        self.count = count
        self.bytes_received = 0
        self._cpu_group = cpu_group
        self._card_group = card_group
        # The error that all ranks have heard of. It is not told again.
        self._told: BaseException | None = None

    @property
    def is_first(self) -> bool:
        """True on rank 0, which alone writes, prints and calls back."""
        return self.rank == 0

    # messages -----------------------------------------------------------------
    def exchange(
        self, place: str, value: Any = None, error: BaseException | None = None
    ) -> list[Any]:
        """The values of all ranks, in the order of ranks.

        Where a rank comes with an error, all ranks raise: that rank its own error, the
        others a `RankError` that names the rank. `Stop`, `KeyboardInterrupt` and a lack
        of memory are raised as what they are. Raises RankError, too, where a rank has
        ended, or is at another place of the program.

        Args:
            place: The place in the program, in words: the same on all ranks.
        """
        if self.count == 1:
            if error is not None:
                raise error
            return [value]
        failure = None if error is None else describe_failure(error)
        messages = self._gather_messages(Message(place, value, failure), error)
        if error is not None:
            self._told = error
            raise error
        for rank, message in enumerate(messages):
            if message.failure is not None:
                raise self._as_told(self._error_of(rank, message.failure))
        for rank, message in enumerate(messages):
            if message.place != place:
                raise self._as_told(
                    RankError(
                        f"rank {rank} of {self.count} is at {message.place}, rank "
                        f"{self.rank} at {place}; let all ranks run the same program."
                    )
                )
        return [message.value for message in messages]

    def tell(self, place: str, error: BaseException) -> None:
        """Lets the other ranks raise, too, unless all have heard of this error."""
        if self.count > 1 and error is not self._told:
            # It raises the error itself, which its caller is about to raise, too.
            with contextlib.suppress(type(error)):
                self.exchange(place, error=error)

    @contextlib.contextmanager
    def together(self, place: str) -> Iterator[None]:
        """A block that all ranks leave together: at its end, or by one rank's error."""
        try:
            yield
        except BaseException as error:
            self.tell(place, error)
            raise
        self.exchange(place)

    def from_first(self, place: str, make: Callable[[], T]) -> T:
        """The result of `make()` on rank 0, on all ranks.

        Raises as `exchange` does where it fails.
        """
        if self.count == 1:
            return make()
        made: list[Any] = [None]
        with self.together(place):
            if self.is_first:
                made = [make()]
        with self._talking():
            dist.broadcast_object_list(made, 0, group=self._cpu_group)
        result: T = made[0]
        return result

    def _gather_messages(
        self, message: Message, error: BaseException | None
    ) -> list[Message]:
        """The messages of all ranks; where that fails, this rank's `error` first."""
        messages: list[Any] = [None] * self.count
        try:
            with self._talking():
                dist.all_gather_object(messages, message, group=self._cpu_group)
        except RankError:
            if error is None:
                raise
            self._told = error
            raise error from None
        return messages

    def _error_of(self, rank: int, failure: Failure) -> BaseException:
        """The error that this rank raises for the failure of another."""
        if failure.raises is not RankError:
            return failure.raises(failure.text)
        return RankError(
            f"rank {rank} of {self.count} failed: {failure.kind}: {failure.text}"
        )

    def _as_told(self, error: BaseException) -> BaseException:
        """The error, marked as one that all ranks have heard of."""
        self._told = error
        return error

    @contextlib.contextmanager
    def _talking(self) -> Iterator[None]:
        """A collective, which fails in one sentence.

        A signal waits until it is over, since a rank that leaves in the middle of a
        collective would leave the others in it.
        """
        try:
            with defer_signals():
                yield
        except RuntimeError as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise self._as_told(
                RankError(
                    f"rank {self.rank} of {self.count}: another rank has ended, or is "
                    f"silent for longer than the timeout ({reason}); see what it says "
                    "itself, and go on from the checkpoint."
                )
            ) from error

    # clients ------------------------------------------------------------------
    def share(
        self,
        num_samples: Tensor,  # [S]
        block_numbers: Tensor | None,  # [S]
        *,
        by_largest: bool = False,
    ) -> list[Tensor]:
        """The positions in a cohort that each rank computes, ascending.

        A rank takes whole blocks, since the last digits of a client depend on the
        clients of its block. The block of most work goes first, each to the rank that
        has least. The result depends on the arguments alone, so all ranks know it.

        Args:
            num_samples: The number of each client's samples, which is its work.
            block_numbers: The number of each client's block, see `assign_blocks`. It is
                not read where there is one rank.
            by_largest: True where each client of a block is as much work as its largest
                one, as in a training under vmap.
        """
        if self.count == 1 or block_numbers is None:
            return [torch.arange(len(num_samples))]
        blocks: dict[int, list[int]] = {}
        for position, block in enumerate(block_numbers.tolist()):
            blocks.setdefault(block, []).append(position)
        costs = {}
        for block, positions in blocks.items():
            sizes = num_samples[positions]
            work = sizes.max() * len(sizes) if by_largest else sizes.sum()
            # A client takes some time, even if it has no samples.
            costs[block] = int(work) + len(positions)
        shares: list[list[int]] = [[] for _ in range(self.count)]
        loads = [0] * self.count
        for block in sorted(blocks, key=lambda b: (-costs[b], b)):
            rank = loads.index(min(loads))
            shares[rank] += blocks[block]
            loads[rank] += costs[block]
        return [torch.tensor(sorted(share), dtype=torch.int64) for share in shares]

    @contextlib.contextmanager
    def own_work(self, place: str) -> Iterator[None]:
        """A block in which each rank computes its share of the clients.

        An error in it is raised on all ranks, and a signal may end it at any time.
        """
        try:
            with allow_signals():
                yield
        except BaseException as error:
            self.tell(place, error)
            raise

    def gather(self, place: str, rows: Any, shares: Sequence[Tensor]) -> Any:
        """The rows of all clients, of which each rank has computed its share.

        Raises as `exchange` does where a rank fails.

        Args:
            place: The place in the program, in words: the same on all ranks.
            rows: This rank's rows, a dict of tensors [s, ...] or `CohortRows`, with the
                same names on all ranks; None on a rank without clients.
            shares: The positions [s] of each rank, from `share`.
        """
        if self.count == 1:
            return rows
        counts = [len(share) for share in shares]
        forms = parcels = error = None
        try:
            # Memory is taken here, where all ranks hear of a lack of it.
            forms = map_rows(row_form, rows)
            parcels = map_rows(partial(self._parcel_of, max(counts)), rows)
        except BaseException as e:
            error = e
        all_forms = self.exchange(place, forms, error)
        if parcels is None:
            # A rank without clients learns the forms of the rows from another.
            forms = next(form for form in all_forms if form is not None)
            parcels = map_rows(partial(self._parcel, max(counts)), forms)
        # The place among the gathered rows, rank after rank, of each client's row.
        order = torch.cat(list(shares)).argsort()
        return map_rows(partial(self._send, counts, order), parcels)

    def _parcel_of(self, count: int, rows: Tensor) -> Parcel:
        """The buffers for `count` rows of each rank, with this rank's rows in them."""
        parcel = self._parcel(count, row_form(rows))
        parcel.sent[: len(rows)] = rows.detach()
        return parcel

    def _parcel(self, count: int, form: RowForm) -> Parcel:
        """The buffers for `count` rows of each rank.

        All ranks send as many rows, as the collective wants it. So a rank with fewer
        clients than another sends some zeros, too.
        """
        device = torch.device(form.device_type)
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        by_card = device.type == "cuda" and self._card_group is not None
        wire_device = device if by_card else torch.device("cpu")
        sent = torch.zeros(count, *form.shape, dtype=form.dtype, device=wire_device)
        received = sent.new_empty(self.count * count, *form.shape)
        return Parcel(sent, received, device)

    def _send(self, counts: Sequence[int], order: Tensor, parcel: Parcel) -> Tensor:
        """The rows [S, ...] of all ranks, in the order of the cohort.

        They travel as bytes: any dtype will do, and their bits stay.
        """
        sent = parcel.sent
        received = parcel.received
        if sent.numel():
            is_on_card = sent.device.type == "cuda"
            group = self._card_group if is_on_card else self._cpu_group
            pieces = received.view(-1).view(torch.uint8).split(sent.nbytes)
            with self._talking():
                as_bytes = sent.view(-1).view(torch.uint8)
                dist.all_gather(list(pieces), as_bytes, group=group)
            self.bytes_received += received.nbytes - sent.nbytes
        parts = received.split(len(sent))
        filled = [part[:count] for part, count in zip(parts, counts, strict=True)]
        rows = torch.cat(filled).to(parcel.device)
        return rows[to_device(order, rows.device)]


@dataclass(frozen=True)
class RowForm:
    """The form of a tensor's rows: dtype, shape, and the kind of their device."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device_type: str


@dataclass(frozen=True)
class Parcel:
    """The buffers with which rows go to all ranks.

    Attributes:
        sent: This rank's rows, and zeros after them.
        received: The rows of all ranks, each as many as are sent.
        device: The device that the rows have in the end.
    """

    sent: Tensor
    received: Tensor
    device: torch.device


def row_form(tensor: Tensor) -> RowForm:
    """The form of a tensor's rows."""
    return RowForm(tensor.dtype, tuple(tensor.shape[1:]), tensor.device.type)


def describe_failure(error: BaseException) -> Failure:
    """An error in the words that travel.

    An error that ends a run in order ends it in order on all ranks. So do a lack of
    memory, and an interrupt.
    """
    raises: type[BaseException] = RankError
    if is_out_of_memory(error):
        raises = MemoryError
    for kind in (Stop, CallbackStop, KeyboardInterrupt):
        if isinstance(error, kind):
            raises = kind
    return Failure(type(error).__name__, str(error), raises)


ONE_RANK = Ranks()
_started: dict[str, Ranks] = {}  # at most one entry: the ranks of this process


def find_ranks(timeout_minutes: float = 30.0) -> Ranks:
    """The ranks that were started together with this one, or this one alone.

    It uses the process group of `torch.distributed` that is there, as under Ray Train.
    Without one it makes one where torchrun's environment says that there are several
    processes. All ranks must call it. Raises RankError where they do not find each
    other in time.

    Args:
        timeout_minutes: For how long ranks wait for each other. The first call of a
            process decides.
    """
    if not _are_ranks_started():
        return ONE_RANK
    if "ranks" not in _started:
        timeout = timedelta(minutes=timeout_minutes)
        try:
            _started["ranks"] = _start_ranks(timeout)
        except RuntimeError as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise RankError(
                f"ranks: the processes did not find each other within "
                f"{timeout_minutes:g} minutes ({reason}); start all of them by "
                "torchrun, or take Hardware(ranks=1)."
            ) from error
    return _started["ranks"]


def _are_ranks_started() -> bool:
    """True where this process is one of several that were started together."""
    if not dist.is_available():
        return False
    if dist.is_initialized():
        return dist.get_world_size() > 1
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    return several and "MASTER_ADDR" in os.environ


def _start_ranks(timeout: timedelta) -> Ranks:
    """The ranks of the default process group, which is made where there is none."""
    has_own_card = torch.cuda.is_available() and (
        int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= torch.cuda.device_count()
    )
    if not dist.is_initialized():
        # NCCL refuses two ranks on one card.
        backend = "cpu:gloo,cuda:nccl" if has_own_card else "gloo"
        _init_process_group(backend, timeout)
    # Messages need the CPU, which a group that another program made may lack.
    cpu_group = dist.new_group(backend="gloo", timeout=timeout)
    card_group = None
    if "nccl" in str(dist.get_backend_config()):
        card_group = dist.group.WORLD
    return Ranks(dist.get_rank(), dist.get_world_size(), cpu_group, card_group)


def _init_process_group(backend: str, timeout: timedelta) -> None:
    """Makes the default process group from torchrun's environment.

    On one machine torchrun keeps its store when it restarts the ranks, and in the store
    the addresses of those that have ended. So each start has keys of its own. Over
    several machines the number of restarts may differ from machine to machine.
    """
    starts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if starts == "0" or os.environ.get("GROUP_WORLD_SIZE") != "1":
        dist.init_process_group(backend, timeout=timeout)
        return
    # torch gives both names without exporting them by its types.
    address = dist.rendezvous("env://", timeout=timeout)  # type: ignore[attr-defined]
    store, rank, count = next(address)
    store = dist.PrefixStore(f"start_{starts}", store)  # type: ignore[attr-defined]
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=count, timeout=timeout
    )


def local_device(device: str) -> str:
    """The card of this rank, where "cuda" leaves the choice."""
    if device != "cuda" or not _are_ranks_started():
        return device
    card = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    torch.cuda.set_device(card)
    return f"cuda:{card}"
