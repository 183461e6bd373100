"""A trace as a replay: what its requests become, and that what was replayed is what is counted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvpd.bench.failure import BenchmarkFailed
from kvpd.bench.fleet import Fleet
from kvpd.bench.replay import MARK_BYTES, DecodePlan, Received, Scale, plan, scale
from kvpd.client import connect_sender
from kvpd.traces import Request

KIB = 1024
CHUNK = 64 * KIB  # bytes
SCALE = Scale(scale_bytes=64, speed=10.0, chunk_bytes=1024, slots=8)
DEADLINE_S = 110.0


def request(*block_ids: int, tokens: int, at: float = 0.0) -> Request:
    return Request(at, tokens, 1, block_ids or None)


def sized(**changes: object) -> Scale:
    fields: dict[str, object] = {
        "chunk_bytes": CHUNK,
        "chunk_tokens": 256,
        "buffer_bytes": 100 * CHUNK,
        "memory_bytes": 1 << 40,
        "moved_bytes": 1 << 40,
        "scale_bytes": None,
        "speed": None,
        "seconds": 60.0,
    }
    return scale([request(tokens=2560), request(tokens=2560, at=600.0)], **(fields | changes))  # type: ignore[arg-type]


def test_chunks_are_equal_exactly_where_their_prompts_are() -> None:
    """A block's id stands for everything before it, so a chunk's key does."""
    a, b, c = plan(
        [request(0, 1, tokens=1024), request(0, 2, tokens=1000), request(0, 1, tokens=1000)], SCALE, chunk_tokens=256
    )
    assert [len(x.keys) for x in (a, b, c)] == [4, 4, 4]
    assert a.keys[:2] == b.keys[:2]
    assert set(a.keys[2:]).isdisjoint(b.keys)
    assert a.keys[:3] == c.keys[:3]
    assert a.keys[3] != c.keys[3], "a chunk that ends earlier is another"


def test_requests_of_a_trace_without_blocks_share_nothing() -> None:
    """It says nothing of their prompts."""
    a, b = plan([request(tokens=512), request(tokens=512)], SCALE, chunk_tokens=256)
    assert len({*a.keys, *b.keys}) == 4


def test_a_last_chunk_is_as_short_as_its_tokens() -> None:
    """And a request comes as much earlier as time is faster."""
    full, half, short = plan(
        [request(tokens=512), request(tokens=384, at=5.0), request(tokens=257, at=20.0)], SCALE, chunk_tokens=256
    )
    assert [x.last_chunk_bytes for x in (full, half, short)] == [1024, 512, 64]
    assert [x.at_s for x in (full, half, short)] == [0.0, 0.5, 2.0]


def test_what_is_not_given_is_chosen_to_fit() -> None:
    """The memory of this machine, the bytes that it can move in a minute, and the minute."""
    assert sized() == Scale(scale_bytes=1, speed=10.0, chunk_bytes=CHUNK, slots=100)
    assert sized(memory_bytes=30 * CHUNK).scale_bytes == 4
    assert sized(moved_bytes=3 * CHUNK).scale_bytes == 8
    assert sized(moved_bytes=1).chunk_bytes == 64


def test_what_is_given_is_kept() -> None:
    """Whoever gives a scale knows the machine."""
    assert sized(scale_bytes=3, speed=2.5) == Scale(scale_bytes=3, speed=2.5, chunk_bytes=CHUNK // 3, slots=100)


@pytest.mark.parametrize(
    ("changes", "reason"), [({"scale_bytes": CHUNK}, "are below 64"), ({"buffer_bytes": CHUNK - 1}, "holds no chunk")]
)
def test_what_cannot_be_replayed_is_refused(changes: dict[str, object], reason: str) -> None:
    """Before anything is started."""
    with pytest.raises(ValueError, match=reason):
        sized(**changes)


def test_a_replay_counts_what_became_of_every_request(tmp_path: Path) -> None:
    """One that can never fit, one that waits too long, and those that share their chunks; times are the trace's."""
    lines = [
        {"timestamp": 0, "input_length": 2048, "output_length": 1, "hash_ids": [1, 2, 3, 4]},
        {"timestamp": 0, "input_length": 4096, "output_length": 1, "hash_ids": list(range(10, 18))},
        {"timestamp": 100, "input_length": 2048, "output_length": 1, "hash_ids": [1, 2, 3, 5]},
        {"timestamp": 40_000, "input_length": 300, "output_length": 1, "hash_ids": [1]},
    ]
    trace, file = tmp_path / "trace.jsonl", tmp_path / "trace.json"
    trace.write_text("\n".join(map(json.dumps, lines)))
    options = {
        "--trace": trace,
        "--model-shape": "layers=2,kv_heads=1,head_dim=64,dtype=fp8",  # 256 bytes a token, 64 KiB a chunk
        "--buffer-size": "512KiB",
        "--speed": 20,
        "--scale-bytes": 16,
        "--prefill-tokens-s": 100,  # the first one holds all of the buffer for 20 s
        "--allocation-timeout-s": 10,
        "--json": file,
    }
    arguments = [str(part) for option in options.items() for part in option]
    done = subprocess.run(
        [sys.executable, "-m", "kvpd", "bench", "trace", *arguments], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stderr
    (run,) = json.loads(file.read_bytes())["runs"]
    result = run["result"]
    assert result["outcomes"] == {"ready": 2, "too_large": 1, "admission_timeout": 1}
    assert result["scale"] == {"scale_bytes": 16, "speed": 20.0, "chunk_bytes": 4 * KIB, "slots": 8}
    assert (result["chunks"], result["bytes_read"]) == (10, 9 * 4 * KIB + 4 * KIB * 44 // 256)
    assert result["time_to_ready"]["count"] == 2
    assert result["time_to_ready"]["max"] >= 20.0
    assert max(sum(sample["slots"].values()) for sample in result["occupancy"]) == 8
    assert "admission_timeout" in done.stdout


def test_a_decode_engine_notices_bytes_that_are_not_a_chunks_own(tmp_path: Path) -> None:
    """A replay that moves the wrong bytes says nothing of the trace."""
    with Fleet(tmp_path) as fleet:
        receiver, sender = fleet.receiver(chunk_bytes=1024, slots=2), fleet.sender(chunk_bytes=1024, slots=2)
        decode = fleet.worker("kvpd.bench.replay_decode")
        decode.call("start", DecodePlan(str(receiver.socket), 0.0), type(None))
        keys = [b"a" * MARK_BYTES, b"b" * MARK_BYTES]
        with (
            connect_sender(sender.socket) as link,
            link.open("wrong", receiver=receiver.address, total_chunks=2) as transfer,
            transfer.stage(keys) as slots,
        ):
            for slot in slots:
                assert slot is not None
                slot[:] = keys[0] + bytes(1024 - MARK_BYTES)
        with pytest.raises(BenchmarkFailed, match="wrong bytes: \\['wrong'\\]"):
            decode.call("finish", ["wrong"], list[Received])
