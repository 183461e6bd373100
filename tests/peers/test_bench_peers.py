"""The benchmark beside the peers, as far as it needs none of them.

Its figures are worth something only if this is right. No time is asserted. The peers' own processes are in another
environment, and `scripts/bench-peers --quick` tries those.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Final

import attrs
import msgspec
import numpy as np
import pytest
import zmq
from peers_app import arguments
from peers_app.children import Child, ChildFailed, cpu_seconds
from peers_app.control import measure_allocations, measure_wake_ups
from peers_app.figures import Pass, Table, goodput_table, median_of, percentile
from peers_app.jobs import JOB_SYSTEMS, KVPD, KVPD_IN_PLACE, measure_job
from peers_app.memory import Buffer, check_stamp, is_equal_between_stamps, pattern, stamp
from peers_app.raw import SYSTEMS, Environment, System, in_turns, measure_raw, open_pair
from peers_app.receivers import free_ports
from peers_app.results import Results
from peers_app.scenarios import STORIES, Outcome
from peers_app.sizes import FULL, KIB, MIB, QUICK, Sizes, size_text
from peers_app.wire import LmcachePeer, Terms

OURS: Final = Environment(Path(sys.executable), Path("/nonexistent"))
TINY: Final = attrs.evolve(
    QUICK,
    buffer_bytes=MIB,
    pass_bytes=2 * MIB,
    chunk_bytes=(64 * KIB,),
    alloc_requests=40,
    alloc_outstanding=8,
    waiters=5,
    wake_ups=5,
    small_requests=5,
)
ONE: Final = Pass("a", "cma", MIB, 1000 * MIB, 1.0, {"source": 0.25, "sink": 0.25}, verified=True)

# ------------------------------------------------------------------ sizes and figures


@pytest.mark.parametrize("sizes", [FULL, QUICK, TINY])
def test_what_is_in_flight_never_shares_a_slot(sizes: Sizes) -> None:
    """Two writes under way into one slot would be no benchmark but a race."""
    for chunk_bytes in sizes.chunk_bytes:
        slots = sizes.buffer_bytes // chunk_bytes
        assert sizes.in_flight <= slots
        assert sizes.job_depth * sizes.job_chunks <= slots
        assert sizes.chunks_in_pass(chunk_bytes) % sizes.in_flight == 0
        assert 0 < sizes.slots_touched(chunk_bytes) <= slots


def test_sizes_are_written_as_people_write_them() -> None:
    """They head the tables' columns."""
    assert [size_text(length) for length in FULL.chunk_bytes] == ["256 KiB", "1 MiB", "8 MiB", "32 MiB"]


def test_a_median_is_a_pass_that_was_measured() -> None:
    """Its CPU time belongs to its goodput: a mean of two passes would have neither."""
    passes = [attrs.evolve(ONE, seconds=seconds) for seconds in (4.0, 1.0, 3.0, 2.0)]
    median = median_of(passes)
    assert median is not None
    assert median.seconds == 3.0
    assert median_of([]) is None
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([1.0], 0.99) == 1.0


def test_a_table_compares_within_a_path_and_shows_wrong_bytes() -> None:
    """A ratio across paths says nothing, and a fast system that moves the wrong bytes is not fast."""
    passes = [
        attrs.evolve(ONE, system="base"),
        attrs.evolve(ONE, system="base", path="tcp", seconds=4.0),
        attrs.evolve(ONE, system="other", path="tcp", seconds=2.0, verified=False),
    ]
    table = goodput_table("T", passes, {MIB: "1 MiB", 8 * MIB: "8 MiB"}, "base")
    assert table.rows == (
        ("base", "cma", "1.05 (1.00), 0.48 s", "not measured", "verified"),
        ("base", "tcp", "0.26 (1.00), 0.48 s", "not measured", "verified"),
        ("other", "tcp", "0.52 (2.00), 0.48 s", "not measured", "WRONG BYTES"),
    )


def test_a_table_becomes_markdown() -> None:
    """It goes into a document as it is."""
    table = Table("Title", ("a", "b"), (("1", "x|y"),), "A note.")
    assert table.markdown() == "### Title\n\n| a | b |\n| --- | --- |\n| 1 | x\\|y |\n\nA note.\n"


def test_every_other_round_goes_backwards() -> None:
    """Whoever always came behind the same neighbour would be measured with what that one leaves behind."""
    first, second = SYSTEMS[:2]
    turns = list(in_turns((first, second), 2))
    assert turns == [(0, first), (0, second), (1, second), (1, first)]


def test_results_are_bad_when_anything_is() -> None:
    """The exit status is what a script sees."""
    sizes = attrs.evolve(TINY, chunk_bytes=(MIB,))
    results = Results(sizes, {"date": "today"}, raw=[ONE], jobs=[attrs.evolve(ONE, system=KVPD_IN_PLACE)])
    results.add_control("alloc", "kvpd", {"rate_per_s": 10.0})
    results.add_control("alloc", "LMCache", {"rate_per_s": 5.0})
    results.add_control("wait 10000", "kvpd", {"cpu_share": 0.0001})
    results.add_control("wait 10000", "LMCache", {"cpu_share": 0.5})
    story = attrs.evolve(STORIES[0], name="s", question="q")
    results.scenarios.append((story, {"kvpd": Outcome(True, "fine"), "LMCache": Outcome(False, "stuck")}))
    assert results.is_good
    text = "\n".join(table.markdown() for table in results.tables())
    assert "| allocations a second, 8 outstanding | 10 /s | 5 /s | 2 |" in text
    assert "| CPU of a core while 10,000 wait | 0.01 % | 50.00 % | < 0.001 |" in text
    assert "| kvpd, no engine copies | cma | source 0.24, sink 0.24 |" in text
    assert "| 1 | s: q | fine | **stuck** |" in text
    assert "Rounds: 1 of 2 MiB, medians shown; requests of 4 chunks, 2 under way." in text
    assert [scenario["fault"] for scenario in results.as_json()["scenarios"]] == [1]
    assert not attrs.evolve(results, left_out={"x": "y"}).is_good
    assert not attrs.evolve(results, jobs=[attrs.evolve(ONE, verified=False)]).is_good
    assert not attrs.evolve(results, scenarios=[(story, {"kvpd": Outcome(False, "stuck")})]).is_good


def test_the_command_line_can_be_read_without_anything_installed() -> None:
    """--help must not wait for gigabytes."""
    parsed = arguments.make_parser().parse_args(["--quick", "--only", "raw", "--rounds", "2"])
    assert (parsed.quick, parsed.only, parsed.rounds) == (True, ["raw"], 2)
    with pytest.raises(SystemExit):
        arguments.make_parser().parse_args(["--rounds", "0"])


# ------------------------------------------------------------------ bytes


def test_a_stamp_tells_a_chunk_from_its_slots_last_content() -> None:
    """The pattern alone would let a chunk pass that was never sent again."""
    chunk = pattern(4096).copy()
    stamp(chunk, 7)
    check_stamp(chunk, 7)
    assert is_equal_between_stamps(chunk, pattern(4096))
    with pytest.raises(AssertionError, match="number 8"):
        check_stamp(chunk, 8)
    chunk[100] ^= 1
    assert not is_equal_between_stamps(chunk, pattern(4096))


@pytest.mark.parametrize("kind", ["anonymous", "memfd"])
def test_a_buffer_holds_the_pattern_only_once_it_was_filled(kind: str) -> None:
    """A sink that starts with the right bytes would verify nothing."""
    buffer = Buffer(65536, "memfd" if kind == "memfd" else "anonymous")
    assert not np.array_equal(buffer.array, pattern(65536))
    buffer.fill()
    assert np.array_equal(buffer.array, pattern(65536))
    buffer.poison()
    assert not np.array_equal(buffer.array, pattern(65536))


@pytest.mark.parametrize("system", [one for one in SYSTEMS if one.ours], ids=lambda one: f"{one.name}, {one.path}")
def test_raw_transfers_are_whole(system: System) -> None:
    """The two processes, the warm-up, the poisoning and the comparison, with those that need no other environment."""
    (measured,) = measure_raw(system, OURS, TINY)
    assert measured.verified
    assert measured.bytes_moved == TINY.pass_bytes
    assert measured.cpu_s["source"] > 0  # a CMA sink sleeps


def test_bytes_that_did_not_arrive_are_noticed() -> None:
    """Otherwise `verified` would say nothing."""
    socket = next(one for one in SYSTEMS if one.module == "socket")
    with open_pair(socket, OURS, MIB) as pair:
        pair.source.ask(30, do="run", count=8, chunk_bytes=65536, in_flight=4)
        assert pair.target.ask(30, do="check", length=8 * 65536)["equal"]
        assert not pair.target.ask(30, do="check", length=9 * 65536)["equal"]


@pytest.mark.parametrize(
    "system",
    [one for one in JOB_SYSTEMS if one.module == "socket" or (one.module == "kvpd" and one.path != "tcp")],
    ids=lambda one: f"{one.name}, {one.path}",
)
def test_jobs_are_whole(system: System) -> None:
    """From engine to engine, through kvpd's daemons and through the pipeline that every peer is driven by."""
    (measured,) = measure_job(system, OURS, TINY)
    assert system.name in (KVPD, KVPD_IN_PLACE, "TCP socket")
    assert measured.verified
    assert measured.bytes_moved == TINY.pass_bytes


def test_a_child_that_fails_says_why() -> None:
    """It is left out of the run by name and with its own last words."""
    with (
        Child("liar", [sys.executable, "-c", "raise SystemExit('no such luck')"]) as child,
        pytest.raises(ChildFailed, match="no such luck"),
    ):
        child.answer(30)


def test_cpu_time_counts_all_threads_of_another_process() -> None:
    """Some peers burn theirs in threads of their own."""
    burn = "import threading\nt = threading.Thread(target=lambda: sum(range(10**6)))\nt.start()\nt.join()\nprint('{}')"
    with Child("burner", [sys.executable, "-uc", burn + "\ninput()"]) as child:
        before = cpu_seconds(child.pid)
        child.answer(30)
        assert child.cpu_s() > before


# ------------------------------------------------------------------ control and scenarios, on kvpd alone


def test_control_figures_are_measured_on_a_real_receiver() -> None:
    """Its answers are counted one by one: a refusal would end the measurement."""
    allocations = measure_allocations("kvpd", OURS, TINY)
    assert set(allocations) == {"alone_p50_us", "alone_p99_us", "rate_per_s", "receiver_cpu_us"}
    assert all(value > 0 for value in (*allocations.values(), *measure_wake_ups("kvpd", OURS, TINY).values()))


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name)
def test_kvpd_comes_through_every_story(story: object) -> None:
    """They are the faults that kvpd was built to make impossible."""
    assert hasattr(story, "play")
    outcome = story.play("kvpd", OURS, TINY)
    assert outcome.ok, outcome.text


def test_ports_for_lmcache_are_not_those_of_passing_connections() -> None:
    """It binds them seconds after they were chosen, and is silent where one is taken."""
    ports = free_ports(5)
    assert len(set(ports)) == 5
    assert max(ports) < 32_768
    with socket.create_server(("127.0.0.1", ports[0])):
        assert ports[0] not in free_ports(5)


def test_lmcache_is_spoken_to_in_its_own_words() -> None:
    """Tags and fields as its msgspec structs have them; nothing else reaches its admission."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        with context.socket(zmq.ROUTER) as router:
            port = router.bind_to_random_port("tcp://127.0.0.1")
            terms = Terms(f"127.0.0.1:{port}", 4096, 1, (2, 2, 16, 32), "bfloat16")
            with LmcachePeer(context, terms) as peer:
                peer.open(1, chunks=2)
                identity, empty, frame = router.recv_multipart()
                request = msgspec.msgpack.decode(frame)
                assert (identity, empty) == (b"bench-%d" % peer.number, b"")
                assert {key: value for key, value in request.items() if key != "keys"} == {
                    "type": "AllocRequest",
                    "fmt": 1,
                    "shape": [2, 2, 16, 32],
                    "dtype": "bfloat16",
                    "last_chunk_toks": 16,
                    "req_id": f"{peer.number}-1",
                    "is_last_batch": False,
                    "total_chunks": 2,
                }
                assert [key.split("@")[0::4] for key in request["keys"]] == [["bench", "bfloat16"]] * 2
                peer.cancel(1)
                cancel = msgspec.msgpack.decode(router.recv_multipart()[-1])
                assert cancel == {"type": "CancelNotif", "req_id": f"{peer.number}-1", "keys": request["keys"]}
                answer = {"type": "AllocResponse", "remote_indexes": [0, 4096]}
                router.send_multipart([identity, b"", msgspec.msgpack.encode(answer)])
                assert peer.receive() == "granted"
    finally:
        context.destroy(linger=0)
