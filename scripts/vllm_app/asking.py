"""HTTP as the demo and the tests need it: one request on a connection of its own, read whole or event by event.

A stream that is left early closes its connection, which is how a server learns that its client has gone.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection, HTTPResponse
from types import TracebackType
from typing import Any, Final, Self

import attrs
from prometheus_client.parser import text_string_to_metric_families

DEADLINE_S: Final = 120.0  # for each byte that is waited for
_DATA = b"data:"
_DONE = b"[DONE]"


@attrs.frozen
class Reply:
    """A whole answer."""

    status: int
    headers: Mapping[str, str]  # names in lower case
    body: bytes

    def json(self) -> Any:
        """The body.

        Raises:
            ValueError: it is no JSON.
        """
        return json.loads(self.body)


class Asked:
    """A request that was sent. A context manager: leaving closes the connection, whatever has come by then."""

    def __init__(self, address: str, method: str, path: str, body: Any = None, *, timeout_s: float = DEADLINE_S):
        self._connection = HTTPConnection(address, timeout=timeout_s)
        self._answer: HTTPResponse | None = None
        sent = None if body is None else json.dumps(body).encode()
        try:
            self._connection.request(method, path, sent, {"Content-Type": "application/json"} if sent else {})
        except BaseException:
            self._connection.close()
            raise

    @property
    def answer(self) -> HTTPResponse:
        """Status and headers, once they have come.

        Raises:
            OSError: they did not come in time, or the connection was lost.
            http.client.HTTPException: what came is no answer.
        """
        if self._answer is None:
            self._answer = self._connection.getresponse()
        return self._answer

    def read(self) -> Reply:
        """All of it. Raises what `answer` does."""
        headers = {name.lower(): value for name, value in self.answer.getheaders()}
        return Reply(self.answer.status, headers, self.answer.read())

    def events(self) -> Iterator[Any]:
        """The events of a stream up to its `[DONE]`. Raises what `answer` does.

        Raises:
            EOFError: the stream ended without it.
        """
        while line := self.answer.readline():
            if not line.startswith(_DATA):
                continue
            data = line[len(_DATA) :].strip()
            if data == _DONE:
                return
            yield json.loads(data)
        raise EOFError("the stream ended without [DONE]")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._answer is not None:
            self._answer.close()
        self._connection.close()


def takes_connections(address: str) -> bool:
    """Whether somebody listens there."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=DEADLINE_S).close()
    except ConnectionRefusedError:
        return False
    return True


def get(address: str, path: str) -> Reply:
    """A page."""
    with Asked(address, "GET", path) as asked:
        return asked.read()


def post(address: str, path: str, body: Any) -> Reply:
    """The answer to a request that does not ask for a stream."""
    with Asked(address, "POST", path, body) as asked:
        return asked.read()


def metric(address: str, name: str, **labels: str) -> float:
    """A metric of a server, as its /metrics names the sample; summed up over all labels that are not given."""
    text = get(address, "/metrics").body.decode()
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )
