"""A round: load, faults at random moments, then quiet, and the books of every daemon must be clean.

What is judged: engines come to rest, every slot is free within its bound, the senders' tables are empty, the proxy
was told of all that was sent, and no process has ended by itself.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Sequence
from typing import Final

import attrs
import trio

from chaos_app.daemons import Daemon, Metrics, slots_of
from chaos_app.faults import FAULTS, Deck, kinds_at
from chaos_app.stage import LEASE_S, PUT_DEADLINE_S, RECEIVER_SLOTS, REQUEST_TIMEOUT_S, Stage
from chaos_app.tally import Tally

LOAD_S: Final = 4.0
_FAULTS_IN_ROUND: Final = (2, 3, 4)
_BUSY_MACHINE_S: Final = 20.0
REST_BOUND_S: Final = REQUEST_TIMEOUT_S + LEASE_S + _BUSY_MACHINE_S
FREE_BOUND_S: Final = REQUEST_TIMEOUT_S + 2 * LEASE_S + PUT_DEADLINE_S + _BUSY_MACHINE_S
_TOLD_BOUND_S: Final = 30.0
_GROWTH_SAMPLES_MIN: Final = 6
_DESCRIPTORS_SLACK: Final = 6
_RESIDENT_SLACK: Final = 12 << 20


@attrs.frozen
class Sample:
    """What a process has after a round, when it is at rest."""

    descriptors: int
    resident_bytes: int


class Rounds:
    """The rounds of one stage."""

    def __init__(self, stage: Stage, rng: random.Random) -> None:
        self._stage = stage
        self._tally: Tally = stage.tally
        self._rng = rng
        self._deck = Deck(rng, kinds_at(stage.site))
        self._samples: dict[tuple[str, int], list[Sample]] = {}
        self._filled: dict[tuple[str, int], float] = {}  # bytes in place, by start of a sender

    async def run_one(self) -> None:
        """One round."""
        starts = {daemon.name: daemon.starts for daemon in self._stage.daemons}
        self._stage.sent.clear()
        self._stage.proxy.begin_round()
        async with trio.open_nursery() as nursery:
            for _ in range(self._rng.choice(_FAULTS_IN_ROUND)):
                kind, at_s = self._deck.draw(), self._rng.random() * LOAD_S
                nursery.start_soon(self._inject, kind, at_s, random.Random(self._rng.random()))
            await trio.sleep(LOAD_S)
        await self._rest()
        await self._judge_told(starts)
        for receiver in self._stage.receivers:
            await self._judge_slots(receiver)
        for sender in self._stage.senders:
            await self._judge_sender(sender)
        self._judge_processes()
        self._tally.told += len(self._stage.proxy.told)
        self._tally.rounds += 1
        for engine in self._stage.prefills:
            await engine.say("run")

    async def _inject(self, kind: str, at_s: float, rng: random.Random) -> None:
        await trio.sleep(at_s)
        self._tally.faults[kind] += 1
        await FAULTS[kind](self._stage, rng)

    async def _rest(self) -> None:
        """Have the prefill engines finish what runs: whatever happened, every call ends."""

        async def pause(number: int) -> None:
            engine = self._stage.prefills[number]
            if not await engine.pause(REST_BOUND_S):
                engine.send_signal(signal.SIGUSR1)  # its stacks, into its tail
                await trio.sleep(1)
                self._tally.problem("hangs", f"{engine.name} does not come to rest:\n" + "\n".join(engine.tail))
                await engine.restart(self._stage.nursery, 0)

        async with trio.open_nursery() as nursery:
            for number in range(len(self._stage.prefills)):
                nursery.start_soon(pause, number)

    async def _judge_told(self, starts: dict[str, int]) -> None:
        """A notification is repeated until it is acknowledged, as long as its sender lives."""
        alive = {sender.name for sender in self._stage.senders if sender.starts == starts[sender.name]}
        wanted = {req_id for req_id, sender in self._stage.sent.items() if sender in alive}
        for req_id in sorted(await self._stage.proxy.until_told(wanted, _TOLD_BOUND_S)):
            self._tally.problem("untold", f"the proxy was never told of {req_id}")
        for req_id in sorted(self._stage.proxy.contradicted):
            self._tally.problem("untold", f"the proxy was told that {req_id} is ready, and that it has failed")

    async def _judge_slots(self, receiver: Daemon) -> None:
        """Every slot is free, or waits for the death of a sender on this host; then for that, and no longer."""

        def is_settled(metrics: Metrics) -> bool:
            slots = slots_of(metrics)
            return slots["free"] + slots["quarantined"] == RECEIVER_SLOTS and not metrics["kvpd_queued_transfers"]

        def is_free(metrics: Metrics) -> bool:
            return slots_of(metrics)["free"] == RECEIVER_SLOTS

        # Across a network the end of the session is fence enough.
        holds = is_free if self._stage.site.is_remote else is_settled
        metrics = await receiver.until(holds, FREE_BOUND_S)
        if metrics is not None and (waiting := slots_of(metrics)["quarantined"]):
            self._tally.fenced_by_death += waiting
            for sender in self._holders(receiver):
                await sender.end(signal.SIGKILL)
                await sender.up(self._stage.nursery)
            metrics = await receiver.until(is_free, FREE_BOUND_S)
        if metrics is None:
            await self._tell_leak(receiver)
            return
        if sum(slots_of(metrics).values()) != RECEIVER_SLOTS:
            self._tally.problem("leaks", f"{receiver.name}: {slots_of(metrics)} do not sum up to {RECEIVER_SLOTS}")
        if metrics["kvpd_sessions"] > len(self._stage.senders):
            self._tally.problem("leaks", f"{receiver.name} still has {metrics['kvpd_sessions']:g} sessions")

    def _holders(self, receiver: Daemon) -> list[Daemon]:
        """The senders whose slots are in quarantine; all of them, where the log does not tell."""
        names = {transfer.partition("/")[0] for transfer in receiver.quarantined}
        return [sender for sender in self._stage.senders if not names or sender.name in names]

    async def _tell_leak(self, receiver: Daemon) -> None:
        try:
            slots: object = slots_of(await receiver.metrics())
        except OSError as exc:
            slots = f"no answer: {exc}"
        last_words = "\n".join(receiver.tail)
        self._tally.problem("leaks", f"{receiver.name}: not every slot is free in time: {slots}\n{last_words}")

    async def _judge_sender(self, sender: Daemon) -> None:
        """Nothing is in flight, and every transfer that was opened has ended."""

        def is_clean(metrics: Metrics) -> bool:
            failed = sum(value for name, value in metrics.items() if name.startswith("kvpd_transfers_failed_total{"))
            open_now = metrics["kvpd_transfers_opened_total"] - metrics["kvpd_transfers_done_total"] - failed
            return not open_now and not metrics["kvpd_in_flight_bytes"]

        metrics = await sender.until(is_clean, FREE_BOUND_S)
        if metrics is None:
            self._tally.problem("leaks", f"{sender.name} does not come to an end:\n" + "\n".join(sender.tail))
            return
        start, filled = (sender.name, sender.starts), metrics["kvpd_filled_bytes_total"]
        self._tally.filled_bytes += int(filled - self._filled.get(start, 0))
        self._filled[start] = filled

    def _judge_processes(self) -> None:
        for process in self._stage.processes:
            if process.crashed:
                self._tally.problem("crashes", process.crashed + "\n" + "\n".join(process.tail))
                process.crashed = ""
        for daemon in self._stage.daemons:
            if daemon.is_alive:
                sample = Sample(daemon.descriptors(), daemon.resident_bytes())
                self._samples.setdefault((daemon.name, daemon.starts), []).append(sample)

    def judge_growth(self) -> None:
        """What a process has at rest must not grow with the rounds."""
        for (name, _), samples in self._samples.items():
            for what in growth(samples):
                self._tally.problem("growths", f"{name} has {what} more after {len(samples)} rounds")


def growth(samples: Sequence[Sample]) -> list[str]:
    """What has grown beyond doubt: the least of the last third is more than the most of the first."""
    if len(samples) < _GROWTH_SAMPLES_MIN:
        return []
    third = len(samples) // 3
    first, last = samples[:third], samples[-third:]
    descriptors = min(s.descriptors for s in last) - max(s.descriptors for s in first)
    resident = min(s.resident_bytes for s in last) - max(s.resident_bytes for s in first)
    found = []
    if descriptors > _DESCRIPTORS_SLACK:
        found.append(f"{descriptors} descriptors")
    if resident > _RESIDENT_SLACK:
        found.append(f"{resident >> 20} MiB")
    return found
