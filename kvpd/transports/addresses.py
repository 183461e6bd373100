"""Addresses: one parser for every place where a person or a peer names one.

`host:port`, `tcp://host:port`, `[v6]:port` and `tcp://[v6]:port` mean what they look like; anything else is refused
with a message that names the value and what is allowed. A name is resolved by us, not by libzmq, before anything is
bound to it, and where it has both IPv4 and IPv6 addresses IPv4 is taken: by those who bind and by those who connect,
so that the two meet.
"""

from __future__ import annotations

import functools
import ipaddress
import re
import socket
from typing import Final

import attrs
import trio

PORT_MAX: Final = 65535
HOST_CHARS_MAX: Final = 253
RESOLVE_TIMEOUT_S: Final = 5.0

_ALLOWED = f"allowed are host:port, tcp://host:port and [ipv6]:port, with a port from 0 to {PORT_MAX}"
_LABEL = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_INPROC = re.compile(r"[A-Za-z0-9_.:/-]{1,200}")
_ZONE = re.compile(r"[A-Za-z0-9_.-]{1,15}")
_DIGITS = re.compile(r"[0-9]{1,5}")
_WILDCARD_NAME = "*"


@attrs.frozen
class Address:
    """A TCP address; `host` is a name or a literal without brackets, port 0 lets the kernel choose."""

    host: str
    port: int

    @property
    def url(self) -> str:
        """`tcp://host:port`, an IPv6 host in brackets."""
        return f"tcp://{self}"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if self.is_ipv6 else f"{self.host}:{self.port}"

    @property
    def is_ipv6(self) -> bool:
        """Whether the host is an IPv6 literal."""
        return ":" in self.host

    @property
    def is_literal(self) -> bool:
        """Whether there is nothing to resolve."""
        return self.host == _WILDCARD_NAME or _literal(self.host) is not None

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it; of names, `localhost` alone is known to be so."""
        literal = _literal(self.host)
        return self.host.lower() == "localhost" if literal is None else literal.is_loopback

    @property
    def is_wildcard(self) -> bool:
        """Whether it stands for every interface: good to bind, nothing to connect to."""
        literal = _literal(self.host)
        return self.host == _WILDCARD_NAME if literal is None else literal.is_unspecified


@attrs.frozen
class InprocAddress:
    """A name within one ZMQ context: for tests that run a whole system in one process."""

    name: str

    @property
    def url(self) -> str:
        """`inproc://name`."""
        return f"inproc://{self.name}"

    def __str__(self) -> str:
        return self.url


Endpoint = Address | InprocAddress


def parse_address(text: str) -> Address:
    """A TCP address to bind to.

    Raises:
        ValueError: it is none; the text says why and what is allowed.
    """
    scheme, separator, rest = text.rpartition("://")
    if separator and scheme.lower() != "tcp":
        raise _refusal(text, f"{scheme!r} is not a scheme of ours")
    host, colon, port = rest.rpartition(":")
    if not colon:
        raise _refusal(text, "it has no port")
    if host.startswith("[") or host.endswith("]"):
        if not (host.startswith("[") and host.endswith("]")):
            raise _refusal(text, "its brackets do not match")
        parsed_host = _parse_ipv6(text, host[1:-1])
    elif _is_ipv6(host) or _is_ipv6(rest):
        raise _refusal(text, "an IPv6 address needs brackets")
    elif ":" in host:
        raise _refusal(text, f"{host!r} holds a port of its own")
    else:
        parsed_host = _parse_host(text, host)
    if not _DIGITS.fullmatch(port):
        raise _refusal(text, f"{port!r} is no port number")
    if int(port) > PORT_MAX:
        raise _refusal(text, f"there is no port {int(port)}")
    return Address(parsed_host, int(port))


def parse_peer_address(text: str) -> Address:
    """A TCP address to connect to: like `parse_address`, but neither a wildcard nor port 0.

    Raises:
        ValueError: it is none; the text says why and what is allowed.
    """
    address = parse_address(text)
    if address.is_wildcard:
        raise _refusal(text, "a wildcard names every interface and so no peer")
    if address.port == 0:
        raise _refusal(text, "port 0 means that the kernel chooses, which a peer cannot know")
    return address


def parse_endpoint(text: str) -> Endpoint:
    """What a control channel can be bound to: a TCP address or `inproc://name`.

    Raises:
        ValueError: it is none; the text says why and what is allowed.
    """
    if text.startswith("inproc://"):
        return _parse_inproc(text)
    return parse_address(text)


@functools.lru_cache(maxsize=1024)  # every request names its receiver
def parse_peer_endpoint(text: str) -> Endpoint:
    """What a control channel can connect to: a peer's TCP address or `inproc://name`.

    Raises:
        ValueError: it is none; the text says why and what is allowed.
    """
    if text.startswith("inproc://"):
        return _parse_inproc(text)
    return parse_peer_address(text)


async def resolve(address: Address) -> Address:
    """The same address with a literal host: IPv4 where the name has one.

    Raises:
        OSError: the name cannot be resolved; the text has the name and the resolver's own words.
    """
    if address.host == _WILDCARD_NAME:
        return attrs.evolve(address, host="0.0.0.0")  # noqa: S104  the operator wrote a wildcard
    if address.is_literal:
        return address
    try:
        with trio.fail_after(RESOLVE_TIMEOUT_S):
            found = await trio.socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except socket.gaierror as exc:
        raise OSError(exc.errno, f"cannot resolve {address.host!r} of {address}: {exc.strerror}") from exc
    except trio.TooSlowError as exc:
        raise TimeoutError(f"cannot resolve {address.host!r} of {address} within {RESOLVE_TIMEOUT_S:g} s") from exc
    hosts = [(family != socket.AF_INET, str(sockaddr[0])) for family, _, _, _, sockaddr in found]
    return attrs.evolve(address, host=min(hosts, key=lambda entry: entry[0])[1])


def _refusal(text: str, why: str) -> ValueError:
    shown = text if len(text) <= 300 else f"{text[:300]}…"
    return ValueError(f"{shown!r} is no address: {why}; {_ALLOWED}")


def _literal(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _is_ipv6(host: str) -> bool:
    return isinstance(_literal(host), ipaddress.IPv6Address)


def _parse_ipv6(text: str, host: str) -> str:
    _, percent, zone = host.partition("%")
    if not _is_ipv6(host) or (percent and not _ZONE.fullmatch(zone)):
        raise _refusal(text, f"{host!r} is no IPv6 address")
    return host


def _parse_host(text: str, host: str) -> str:
    if host == _WILDCARD_NAME:
        return host
    if not host:
        raise _refusal(text, "it has no host")
    labels = host.removesuffix(".").split(".")
    if len(host) > HOST_CHARS_MAX or not all(_LABEL.fullmatch(label) for label in labels):
        raise _refusal(text, f"{host!r} is no host name")
    # A name cannot end in a number, so this was meant as an IPv4 address; resolvers would read 10.1 as 10.0.0.1.
    if labels[-1].isdigit() and _literal(host) is None:
        raise _refusal(text, f"{host!r} is no IPv4 address")
    return host


def _parse_inproc(text: str) -> InprocAddress:
    name = text.removeprefix("inproc://")
    if not _INPROC.fullmatch(name):
        raise ValueError(f"{text!r} is no address: an inproc name has 1 to 200 letters, digits and ._:/-")
    return InprocAddress(name)
