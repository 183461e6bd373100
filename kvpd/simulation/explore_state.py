"""What an exhaustive search explores: one small world's configuration, and one of its states as a value.

A state is a tuple of tuples of small numbers and short texts. The cores are in it by their numbers (explore_cores), so
two states are equal exactly when nothing in them can ever behave differently.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import attrs

from kvpd.core.events import TransferId

RECEIVER: Final = "receiver"
PROXY: Final = "proxy"
CHUNK_BYTES: Final = 64

# What may go wrong, each as often as a world's budget says; nothing of it is needed for a clean ending.
FAULTS: Final = (
    "cancel",  # a prefill engine cancels a request
    "retry",  # a prefill engine opens a request again, under the same name
    "cancel_claim",  # a decode engine cancels a request
    "early",  # a decode engine claims before anything is ready
    "prefill_dies",  # all that the engine of a sender has open
    "decode_dies",  # the decode engine and all its claims; another takes its place
    "sender_restarts",
    "receiver_restarts",
    "loss",  # a connection breaks: what is on its way is lost, both ways
    "force",  # the put deadline passes before puts have drained: they are cut off, and may still land
    "fail",  # a put fails
    "slow",  # a deadline passes although nothing stands still
    "corrupt",  # a chunk holds other bytes than its checksum says
    "repeat",  # a repeat or a heartbeat comes although nothing was lost
)

TransferKey = tuple[int, int, int]  # sender, incarnation, transfer_no
Worker = tuple[int, int]  # receiver's incarnation, session_no


def transfer_key(transfer: TransferId) -> TransferKey:
    """A transfer's identity in small numbers."""
    return int(transfer.sender_id[1:]), transfer.incarnation, transfer.transfer_no


@attrs.frozen
class Request:
    """One request of one sender's engine: its label and the keys of its batches. With ranks, one rank's part of it."""

    sender: int
    req_id: str
    batches: tuple[tuple[bytes, ...], ...]
    rank: int = 0

    @property
    def keys(self) -> tuple[bytes, ...]:
        """All its chunks, in order."""
        return tuple(key for batch in self.batches for key in batch)


@attrs.frozen
class WorldConfig:
    """A small world: one receiver, its senders, their requests, and what may go wrong how often."""

    name: str
    requests: tuple[Request, ...]
    slots: int = 3
    staging_slots: int = 2
    same_host: bool = False
    in_place: bool = False  # engines fill the receiver's slots themselves, on its host
    has_proxy: bool = False
    verifies: bool = False  # chunks by their checksums, before they are ready
    opens_with_batch: bool = False  # the first batch comes with the open, and is asked for in the same message
    stages_late: bool = False  # batches are asked for one after another, at any time; else all of them with the open
    # Requests whose engines never fill what they staged: the decode engine gives them up in the end.
    stalled: frozenset[int] = frozenset()
    patient: frozenset[str] = frozenset()  # deadlines that do not pass early
    is_symmetric: bool = False  # the senders differ in nothing but their numbers
    budget: Mapping[str, int] = attrs.field(factory=dict)
    about: str = ""
    is_large: bool = False  # takes minutes

    @property
    def senders(self) -> int:
        """How many senders there are."""
        return 1 + max(request.sender for request in self.requests)

    @property
    def ranks(self) -> int:
        """How many ranks each engine has."""
        return 1 + max(request.rank for request in self.requests)


class Put(NamedTuple):
    """One chunk, staged or on the wire: from which staging slot, to which of the receiver's, and what it holds.

    Slots are counted through all ranks: first those of rank 0, then those of rank 1.
    """

    local: int
    slot: int
    key: bytes


class Granted(NamedTuple):
    """A piece whose slots an engine may fill. In place they are a receiver's, behind `worker`, and `owner` is whose."""

    number: int
    puts: tuple[Put, ...]
    owner: TransferKey | None = None
    worker: Worker = (0, 0)


class Piece(NamedTuple):
    """One piece's puts that have not landed yet, and through which endpoint and into which worker they go."""

    number: int
    endpoint: int
    worker: Worker
    puts: tuple[Put, ...]
    keys: tuple[bytes, ...]  # of all its puts, those that have landed too


class Task(NamedTuple):
    """A sender's task of one transfer: its pieces in flight, and how it is ending."""

    sender: int
    transfer_no: int
    is_cancelled: bool = False
    is_cut: bool = False
    pieces: tuple[Piece, ...] = ()


class Loose(NamedTuple):
    """A put whose endpoint was cut off: it may land yet. Or what an engine may yet write whose sender is dead."""

    owner: TransferKey
    worker: Worker
    put: Put
    by_engine: bool = False


class Verifying(NamedTuple):
    """A WriteDone whose checksums are being compared: by slot, what it should hold."""

    transfer: TransferKey
    message: int
    expected: tuple[tuple[int, int], ...]


class Connection(NamedTuple):
    """One control connection: what is on its way up to the receiver and down to the sender."""

    sender: int
    incarnation: int
    number: int
    is_open: bool = True
    up: tuple[int, ...] = ()  # messages, by number
    down: tuple[int, ...] = ()

    @property
    def identity(self) -> bytes:
        """What the receiver knows it by."""
        return f"s{self.sender}/{self.incarnation}/{self.number}".encode()


class Endpoint(NamedTuple):
    """A sender's endpoint into one of the receiver's workers."""

    sender: int
    number: int
    worker: Worker
    is_made: bool


class Session(NamedTuple):
    """What the receiver's service keeps of a session: its worker, and whether it watches the sender's process."""

    number: int
    sender: int
    incarnation: int
    is_made: bool
    is_alive: bool
    is_watched: bool


class Prefill(NamedTuple):
    """What a prefill engine does about one request."""

    is_opened: bool = False  # at some time
    has_failed: bool = False  # the last time
    holds: bool = False  # it has not left the transfer yet
    is_over: bool = False  # it was told how the transfer ended
    transfer_no: int = 0  # of its own open
    joined: int = 0  # the transfer's, which is another rank's where that one had opened it before
    staged: int = 0  # batches asked for
    filling: tuple[Granted, ...] = ()


class Decode(NamedTuple):
    """What a rank of the decode engine does about one label: transfers known to be ready, and its claim."""

    ready: tuple[TransferKey, ...] = ()
    is_waiting: bool = False
    reading: tuple[tuple[int, bytes], ...] = ()  # slot, key


class State(NamedTuple):
    """Everything."""

    senders: tuple[int, ...]
    receiver: int
    connections: tuple[Connection, ...]
    tasks: tuple[Task, ...]
    endpoints: tuple[Endpoint, ...]
    loose: tuple[Loose, ...]
    sessions: tuple[Session, ...]
    memory: tuple[bytes, ...]  # what has landed in each slot of each rank
    prefill: tuple[Prefill, ...]
    decode: tuple[Decode, ...]  # by label, and of each by rank
    decode_engine: int
    queue: tuple[TransferKey, ...]  # who waits for admission, in the order they came
    opened: tuple[TransferKey, ...]  # who ever joined that queue: nobody does twice
    complete: tuple[TransferKey, ...]  # those the receiver called ready, until their sender knows
    verifying: tuple[Verifying, ...]
    notifications: tuple[tuple[int, int], ...]  # sender, message
    budget: tuple[int, ...]


def content(key: bytes, rank: int) -> bytes:
    """What a rank has of a chunk: under the same key, other bytes than the others."""
    return key + b"#%d" % rank if rank else key


class Messages:
    """Messages by number: a queue of numbers is quick to compare."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._all: list[Any] = []

    def number(self, message: Any) -> int:
        """The number of this very message."""
        number = self._numbers.setdefault(message, len(self._all))
        if number == len(self._all):
            self._all.append(message)
        return number

    def __getitem__(self, number: int) -> Any:
        return self._all[number]


class Violation(Exception):
    """Something happened that must be impossible."""
