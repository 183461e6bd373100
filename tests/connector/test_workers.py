"""The connector's workers and its board, with real daemons between them and an engine made of numpy arrays."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import attrs
import numpy as np
import pytest
from e2e.daemons import DEADLINE_S, Daemon, Fleet

import kvpd.client
from kvpd.errors import ErrorCode
from kvpd.integrations.vllm.blocks import Bytes, KvBlocks
from kvpd.integrations.vllm.board import Board
from kvpd.integrations.vllm.decode_worker import DecodeWorker
from kvpd.integrations.vllm.keys import chunk_keys
from kvpd.integrations.vllm.links import LinkKeeper
from kvpd.integrations.vllm.metadata import ChunkSource, Failure, LoadJob, OpenJob, SaveJob, Step
from kvpd.integrations.vllm.prefill_worker import PrefillWorker
from kvpd.integrations.vllm.stats import Tally, empty, summary

from .parts import LAYOUT

BLOCKS = 12
CHUNK_BYTES = 8192  # two blocks of two layers
KEYS = tuple(chunk_keys(LAYOUT.digest, list(range(80)), 32, []))  # of a prompt of five blocks


def layers(seed: int) -> list[Bytes]:
    """Two layers whose blocks have different sizes: nothing may count on their being the same."""
    source = np.random.default_rng(seed)
    return [source.integers(0, 256, (BLOCKS, size), np.uint8) for size in (1024, 3072)]


@attrs.define
class Pair:
    """A prefill and a decode engine."""

    sender: Daemon
    receiver: Daemon
    prefill: PrefillWorker
    decode: DecodeWorker
    board: Board
    source: list[Bytes]
    target: list[Bytes]
    tally: Tally

    def open(self, name: str, chunks: int = 3) -> None:
        """Before a step."""
        self.prefill.begin(Step(opens=[OpenJob(name, f"t-{name}", self.receiver.address, chunks)]))

    def save(self, name: str, first: int, blocks: Sequence[Sequence[int]], *, is_last: bool) -> None:
        """After a step."""
        chunks = tuple(ChunkSource(KEYS[first + n], tuple(ids)) for n, ids in enumerate(blocks))
        self.prefill.submit(Step(saves=[SaveJob(name, chunks, is_last)]))

    def load(self, name: str, first_block: int, block_ids: Sequence[int], keys: Sequence[bytes] = KEYS) -> bool:
        """Load into the target's blocks; whether that went well."""
        self.decode.submit([LoadJob(name, f"t-{name}", tuple(keys), first_block, tuple(block_ids))])
        received: set[str] = set()
        failed: set[str] = set()

        def is_over() -> bool:
            more, bad = self.decode.results()
            received.update(more)
            failed.update(bad)
            return name in received

        until(is_over)
        return name not in failed


def until(holds: Callable[[], bool]) -> None:
    """Ask anew, as an engine does each step, until it holds."""
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.001)  # a step of the engine


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with Fleet(tmp_path) as fleet:
        receiver = fleet.receiver("r", slots=8, chunk_bytes=CHUNK_BYTES)
        sender = fleet.sender("s", slots=4, chunk_bytes=CHUNK_BYTES, notify_proxy="false")
        receiver.wait_ready()
        sender.wait_ready()
        tally = Tally()
        to_sender = LinkKeeper(lambda: kvpd.client.connect_sender(sender.socket), lambda link: None)
        to_receiver = LinkKeeper(lambda: kvpd.client.connect_receiver(receiver.socket), lambda link: None)
        events = LinkKeeper(lambda: kvpd.client.connect_receiver(receiver.socket), lambda link: None)
        made = Pair(
            sender,
            receiver,
            PrefillWorker(to_sender, tally),
            DecodeWorker(to_receiver, LAYOUT, tally),
            Board(events),
            layers(1),
            layers(2),
            tally,
        )
        made.prefill.register(KvBlocks(made.source))
        made.decode.register(KvBlocks(made.target))
        receiver.wait_for("engine_attached")  # the board's
        yield made
        made.prefill.close()
        made.decode.close()
        made.board.close()


def same(pair: Pair, source: Sequence[int], target: Sequence[int]) -> bool:
    """Whether these blocks hold the same bytes, in all layers."""
    return all(
        bool((one[list(source)] == other[list(target)]).all())
        for one, other in zip(pair.source, pair.target, strict=True)
    )


def test_blocks_arrive_where_they_belong(pair: Pair) -> None:
    """In two steps, out of order in memory, the first block being here already."""
    pair.open("a")
    pair.save("a", 0, [[4, 2]], is_last=False)
    pair.save("a", 1, [[9, 0], [7]], is_last=True)
    until(lambda: pair.board.is_ready("t-a"))
    before = [layer.copy() for layer in pair.target]
    assert pair.load("a", 1, [3, 11, 5, 6])
    assert same(pair, [2, 9, 0, 7], [3, 11, 5, 6])
    others = [block for block in range(BLOCKS) if block not in (3, 11, 5, 6)]
    assert all((layer[others] == old[others]).all() for layer, old in zip(pair.target, before, strict=True))
    assert pair.prefill.results({"a"}) == {"a"}
    pair.receiver.wait_quiet()
    assert pair.receiver.slots() == {"free": 8}
    # Whoever comes with the same transfer later need not wait to learn that it was used.
    until(lambda: pair.board.failure("t-a") is not None)
    assert pair.board.failure("t-a") == Failure(
        ErrorCode.CLAIMED, "its KV was claimed and released before; a transfer serves one request"
    )


def test_preempted_blocks_are_copied_before_they_are_overwritten(pair: Pair) -> None:
    """The scheduler has given them to another request: what was not staged yet must not be its bytes."""
    with kvpd.client.connect_sender(pair.sender.socket) as link:
        blocker = link.open("blocker", receiver=pair.receiver.address, total_chunks=8)
        pair.receiver.wait_for("transfer_admitted")
        pair.open("a")
        pair.save("a", 0, [[0, 1]], is_last=False)  # cannot be staged: it is not admitted
        pair.prefill.preempt(["a", "unknown"])
        kept = [layer.copy() for layer in pair.source]
        for layer in pair.source:
            layer[:] = 0
        blocker.cancel()
        with pytest.raises(kvpd.TransferCancelled), blocker, blocker.stage([b"x"]):
            pass
    pair.receiver.wait_for("chunks_written")
    for layer, old in zip(pair.source, kept, strict=True):
        layer[5:8] = old[5:8]
    pair.save("a", 1, [[5, 6], [7]], is_last=True)
    until(lambda: pair.board.is_ready("t-a"))
    assert pair.load("a", 0, [0, 1, 2, 3, 4])
    pair.source[:] = kept
    assert same(pair, [0, 1, 5, 6, 7], [0, 1, 2, 3, 4])


def test_an_aborted_prompts_blocks_are_reported_and_its_room_is_freed(pair: Pair) -> None:
    """Its other chunks will never come: whoever waits for them waits for ever."""
    pair.open("a")
    pair.save("a", 0, [[0, 1]], is_last=False)
    pair.receiver.wait_for("chunks_written")
    until(lambda: pair.prefill.results({"a"}) == {"a"})
    assert pair.prefill.take_failures() == {}
    pair.receiver.wait_quiet()
    assert pair.receiver.slots() == {"free": 8}


def test_a_request_aborted_before_its_first_chunk_gives_its_room_back(pair: Pair) -> None:
    """Nothing was kept for it, so nothing is reported."""
    pair.open("a")
    pair.receiver.wait_for("transfer_admitted")
    assert pair.prefill.results({"a"}) == set()
    pair.receiver.wait_quiet()
    assert pair.receiver.slots() == {"free": 8}


def test_a_refusal_is_seen_although_nothing_was_staged(pair: Pair) -> None:
    """The engine can then fail the request instead of computing it for nothing."""
    pair.open("a", chunks=9)
    failures: list[Failure] = []

    def is_seen() -> bool:
        failures.extend(pair.prefill.take_failures().values())
        return bool(failures)

    until(is_seen)
    assert [failure.code for failure in failures] == [ErrorCode.TOO_LARGE]
    assert pair.prefill.results({"a"}) == set()


def test_a_refusal_that_meets_chunks_frees_their_blocks_and_says_why(pair: Pair) -> None:
    """The prompt is computed in several steps, and refused behind the first: nothing is kept for the rest of it."""
    pair.open("a", chunks=9)
    pair.save("a", 0, [[0, 1]], is_last=False)
    failures: list[Failure] = []

    def is_seen() -> bool:
        failures.extend(pair.prefill.take_failures().values())
        return bool(failures)

    until(is_seen)
    assert [failure.code for failure in failures] == [ErrorCode.TOO_LARGE]
    assert "9 chunks do not fit the buffer's 8" in failures[0].detail
    until(lambda: pair.prefill.results({"a"}) == {"a"})
    pair.receiver.wait_quiet()
    assert pair.receiver.slots() == {"free": 8}


def test_a_request_that_is_refused_does_not_hold_up_the_next(pair: Pair) -> None:
    """Its thread ends, and what the daemon holds for it goes."""
    for name in ("first", "second"):
        pair.open(name, chunks=9)
        pair.save(name, 0, [[0, 1], [2, 3], [4]], is_last=True)
        until(lambda name=name: pair.prefill.results({name}) == {name})  # type: ignore[misc]
    pair.open("fits")
    pair.save("fits", 0, [[0, 1], [2, 3], [4]], is_last=True)
    until(lambda: pair.board.is_ready("t-fits"))
    assert pair.load("fits", 0, [0, 1, 2, 3, 4])


def test_without_a_daemon_blocks_are_free_and_the_reason_is_known(pair: Pair) -> None:
    """An engine must not keep blocks for a daemon that has died."""
    pair.sender.kill()
    pair.open("a")
    pair.save("a", 0, [[0, 1], [2, 3], [4]], is_last=True)
    until(lambda: bool(pair.prefill.results({"a"})))
    assert pair.prefill.take_failures()["a"].code is ErrorCode.PEER_LOST


def test_p47_a_claim_with_other_chunks_than_expected_writes_nothing(pair: Pair) -> None:
    """Half of the layers, another prompt, a shorter one: never written into a block."""
    for name, keys in (("fewer", KEYS[:2]), ("other", chunk_keys(LAYOUT.digest, [7] * 80, 32, []))):
        pair.open(name)
        pair.save(name, 0, [[0, 1], [2, 3], [4]], is_last=True)
        until(lambda name=name: pair.board.is_ready(f"t-{name}"))  # type: ignore[misc]
        before = [layer.copy() for layer in pair.target]
        assert not pair.load(name, 0, [0, 1, 2, 3], keys)
        assert all((layer == old).all() for layer, old in zip(pair.target, before, strict=True))
        pair.receiver.wait_quiet()
    assert pair.receiver.slots() == {"free": 8}


def test_the_board_frees_what_lands_after_it_was_given_up(pair: Pair) -> None:
    """Its request needs nothing of it: the sender may finish, and the room is free all the same."""
    pair.board.discard("t-a", at_once=False)
    pair.open("a")
    pair.save("a", 0, [[0, 1], [2, 3], [4]], is_last=True)
    pair.receiver.wait_for("transfer_completed")
    pair.receiver.wait_quiet()
    assert pair.receiver.slots() == {"free": 8}
    assert pair.prefill.take_failures() == {}


def test_the_board_frees_at_once_what_has_landed_and_is_not_needed(pair: Pair) -> None:
    """No second announcement will come that could remind it."""
    pair.open("a")
    pair.save("a", 0, [[0, 1], [2, 3], [4]], is_last=True)
    until(lambda: pair.board.is_ready("t-a"))
    pair.board.discard("t-a", at_once=False)
    pair.receiver.wait_quiet()
    assert pair.receiver.slots() == {"free": 8}


def test_whoever_waits_at_the_board_hears_that_a_transfer_is_ready(pair: Pair) -> None:
    """A wait that ended late would be added to every request's time to first token."""
    pair.open("a")
    pair.save("a", 0, [[0, 1], [2, 3], [4]], is_last=True)
    began = time.monotonic()
    while not pair.board.is_ready("t-a"):
        pair.board.wait(DEADLINE_S)
    assert time.monotonic() - began < DEADLINE_S / 2


def test_the_board_knows_when_its_receiver_is_lost(pair: Pair) -> None:
    """What was ready there will not be claimed any more."""
    pair.open("a")
    pair.save("a", 0, [[0, 1], [2, 3], [4]], is_last=True)
    until(lambda: pair.board.is_ready("t-a"))
    pair.receiver.kill()
    until(lambda: pair.board.failure("t-a") is not None)
    assert not pair.board.is_ready("t-a")
    assert not pair.load("a", 0, [0, 1, 2, 3, 4])


def test_p49_blocks_need_no_shape_but_their_bytes() -> None:
    """One head of 576 with K alone (MLA): nothing here counts twice for K and V."""
    blocks = KvBlocks([np.arange(4 * 16 * 576, dtype=np.uint16).reshape(4, -1).view(np.uint8)])
    assert blocks.block_bytes == 16 * 576 * 2
    chunk = memoryview(bytearray(2 * blocks.block_bytes))
    blocks.gather([3, 1], chunk)
    other = np.zeros((4, blocks.block_bytes), np.uint8)
    KvBlocks([other]).scatter(chunk, 2, 1, [0])
    again = memoryview(bytearray(blocks.block_bytes))
    blocks.gather([1], again)
    assert other[0].tobytes() == bytes(again)


def test_impossible_copies_are_refused() -> None:
    """A block number out of range would read or write another's memory."""
    blocks = KvBlocks(layers(1))
    with pytest.raises(ValueError, match="blocks 12 to 12 of 12"):
        blocks.gather([12], memoryview(bytearray(4096)))
    with pytest.raises(ValueError, match="4095 bytes for 1 blocks"):
        blocks.gather([1], memoryview(bytearray(4095)))
    with pytest.raises(ValueError, match="no chunk of 1 blocks"):
        blocks.scatter(memoryview(bytearray(4096)), 1, 1, [0])
    with pytest.raises(ValueError, match="no KV cache"):
        KvBlocks([])


def test_what_is_counted_is_taken_once() -> None:
    """vLLM asks each step, and adds up."""
    tally = Tally()
    assert tally.take() is None
    tally.sent(1_000_000, 0.5)
    tally.received(2_000_000, 0.25)
    tally.deduplicated()
    tally.failed("send", ErrorCode.REVOKED)
    data = tally.take()
    assert data is not None
    assert summary(data)["kvpd MB received"] == 2.0
    assert summary(data)["kvpd transfers failed"] == 1
    assert tally.take() is None
    assert summary(empty())["kvpd transfers sent"] == 0
