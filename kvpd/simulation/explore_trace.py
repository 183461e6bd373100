"""Steps of a counterexample in words."""

from __future__ import annotations

from typing import Any

from kvpd.simulation.explore_acts import Acts
from kvpd.simulation.explore_moves import Move
from kvpd.simulation.explore_state import State


def tell(message: Any) -> str:
    """A message in words."""
    parts = [type(message).__name__]
    number = getattr(message, "transfer_no", None)
    if number is not None:
        parts.append(f"of transfer {number}")
    if parts[0] == "AllocRequest":
        parts.append(f"for {b' '.join(message.keys).decode()}" if message.keys else "without keys")
    if getattr(message, "remote_indexes", ()):
        parts.append(f"slots {', '.join(map(str, message.remote_indexes))}")
    if (drained := getattr(message, "drained", None)) is not None:
        parts.append("drained" if drained else "NOT drained")
    if (count := getattr(message, "count", None)) is not None:
        parts.append(f"chunks {message.first_chunk} to {message.first_chunk + count - 1}")
    if (error := getattr(message, "error", None)) is not None:
        parts.append(f"with the error {error.code}")
    return " ".join(parts)


def describe(world: Acts, state: State, move: Move) -> str:
    """A move in words."""
    kind, *rest = move
    if kind in ("up", "down"):
        return _message(world, state, kind, rest[0])
    if kind in ("land", "late"):
        return _put(state, kind, rest)
    if kind in ("tick", "slow", "repeat"):
        return _deadline(kind, rest)
    if kind in _TASKS:
        task = state.tasks[rest[0]]
        return f"s{task.sender}: transfer {task.transfer_no}: {_TASKS[kind]}"
    if kind in _ENGINES:
        request = world.config.requests[rest[0]]
        rank = f", rank {request.rank}" if world.config.ranks > 1 else ""
        return f"engine of s{request.sender}{rank}: {_ENGINES[kind]} {request.req_id}"
    if kind in _CLAIMS:
        names = world.labels if kind in ("cancel_claim", "gives_up") else world.claimants
        return f"decode engine: {_CLAIMS[kind]} {names[rest[0]]}"
    return _others(state, kind, rest)


def _message(world: Acts, state: State, kind: str, at: int) -> str:
    connection = state.connections[at]
    name = connection.identity.decode()
    if kind == "up":
        return f"receiver hears {tell(world.messages[connection.up[0]])} from {name}"
    return f"s{connection.sender} hears {tell(world.messages[connection.down[0]])}"


def _put(state: State, kind: str, rest: list[int]) -> str:
    if kind == "late":
        item = state.loose[rest[0]]
        sender, incarnation, number = item.owner
        what = f"s{sender}, incarnation {incarnation}: a put of transfer {number} that was cut off lands all the same"
        return f"{what}: {item.put.key.decode()} in slot {item.put.slot}"
    task = state.tasks[rest[0]]
    put = task.pieces[rest[1]].puts[rest[2]]
    return f"s{task.sender}: transfer {task.transfer_no}: {put.key.decode()} lands in slot {put.slot}"


def _deadline(kind: str, rest: list[Any]) -> str:
    side = "receiver" if rest[0] < 0 else f"s{rest[0]}"
    name, of = rest[1]
    what = name if of is None or of == "receiver" else f"{name} of {of}"
    suffix = {"tick": "nothing else happens, and a deadline passes", "slow": "a deadline passes early"}
    return f"{side}: {suffix.get(kind, 'a deadline passes')}: {what}"


def _others(state: State, kind: str, rest: list[Any]) -> str:
    match kind:
        case "worker" | "died":
            session = state.sessions[rest[0]]
            what = "its worker is made" if kind == "worker" else "the death of its sender is seen"
            return f"receiver: session {session.number} of s{session.sender}: {what}"
        case "endpoint":
            endpoint = state.endpoints[rest[0]]
            return f"s{endpoint.sender}: endpoint {endpoint.number} is made, or cannot be"
        case "verified" | "corrupt":
            what = "are compared" if kind == "verified" else "do not match"
            return f"receiver: the checksums of transfer {state.verifying[rest[0]].transfer} {what}"
        case "proxy":
            return "proxy acknowledges a notification"
        case "sender_restarts":
            return f"s{rest[0]} is killed and starts anew"
        case "receiver_restarts":
            return "receiver is killed and starts anew"
        case "prefill_dies":
            return f"engine of s{rest[0]} dies"
        case "decode_dies":
            return "decode engine dies, another takes its place"
        case "loss":
            return f"connection {state.connections[rest[0]].identity.decode()} breaks; what was on its way is lost"
    raise AssertionError(kind)


_TASKS = {
    "completed": "its puts are seen to have ended",
    "drained": "its puts have drained",
    "force": "the put deadline passes; its endpoint is cut off",
    "failed": "a put fails, its target is gone",
    "fail": "a put fails",
}
_ENGINES = {
    "open": "opens",
    "retry": "opens once more",
    "stage": "stages the next batch of",
    "fill": "fills a piece of",
    "leave": "leaves",
    "cancel": "cancels",
}
_CLAIMS = {
    "claim": "claims",
    "early": "claims early",
    "release": "has read",
    "cancel_claim": "cancels",
    "gives_up": "gives up",
}
