"""One parser reads every address, and what it refuses it refuses in one sentence."""

from __future__ import annotations

import socket

import pytest
import trio

from kvpd.transports.addresses import (
    Address,
    InprocAddress,
    parse_address,
    parse_endpoint,
    parse_peer_address,
    parse_peer_endpoint,
    resolve,
)


@pytest.mark.parametrize(
    ("text", "host", "port", "url"),
    [
        ("127.0.0.1:7300", "127.0.0.1", 7300, "tcp://127.0.0.1:7300"),
        ("tcp://127.0.0.1:7300", "127.0.0.1", 7300, "tcp://127.0.0.1:7300"),
        ("TCP://decode-0:0", "decode-0", 0, "tcp://decode-0:0"),
        ("decode-0.prod_a.svc.cluster.local.:9100", "decode-0.prod_a.svc.cluster.local.", 9100, None),
        ("[::1]:7300", "::1", 7300, "tcp://[::1]:7300"),
        ("tcp://[fd00::1]:65535", "fd00::1", 65535, "tcp://[fd00::1]:65535"),
        ("[fe80::1%eth0]:7300", "fe80::1%eth0", 7300, "tcp://[fe80::1%eth0]:7300"),
        ("*:7300", "*", 7300, "tcp://*:7300"),
    ],
)
def test_p80_an_address_means_what_it_looks_like(text: str, host: str, port: int, url: str | None) -> None:
    """IPv6-only clusters broke on every split(':')."""
    address = parse_address(text)
    assert (address.host, address.port) == (host, port)
    assert url is None or address.url == url
    assert parse_address(address.url) == address


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no port"),
        ("7300", "no port"),
        ("10.0.0.1", "no port"),
        (":7300", "no host"),
        ("http://x:80", "'http' is not a scheme"),
        ("tcp://tcp://x:80", "'tcp://tcp' is not a scheme"),
        ("ipc:///tmp/x:1", "'ipc' is not a scheme"),
        ("10.0.0.1:10000:7300", "a port of its own"),
        ("x:70000", "no port 70000"),
        ("x:-1", "'-1' is no port number"),
        ("x:", "'' is no port number"),
        ("x:7300/path", "'7300/path' is no port number"),
        ("x:٣", "is no port number"),
        ("::1", "needs brackets"),
        ("::1:7300", "needs brackets"),
        ("fe80::1%eth0:7300", "needs brackets"),
        ("[::1]", "brackets do not match"),
        ("[::1:7300", "brackets do not match"),
        ("[10.0.0.1]:7300", "is no IPv6 address"),
        ("[fe80::1%e th]:7300", "is no IPv6 address"),
        ("[]:7300", "is no IPv6 address"),
        ("10.0.0:7300", "is no IPv4 address"),
        ("10.0.0.256:7300", "is no IPv4 address"),
        ("a b:7300", "is no host name"),
        ("user@host:7300", "is no host name"),
        ("-x:7300", "is no host name"),
        ("é:7300", "is no host name"),
        ("x\r\n:7300", "is no host name"),
        ("x" * 400 + ":7300", "is no host name"),
    ],
)
def test_p67_a_bad_address_is_refused_by_name(text: str, reason: str) -> None:
    """Who reads the refusal must see the value, what is wrong with it and what would be right."""
    with pytest.raises(ValueError, match=r"is no address.*allowed are host:port") as refused:
        parse_address(text)
    assert reason in str(refused.value)
    assert repr(text)[1:100] in str(refused.value)


@pytest.mark.parametrize("text", ["0.0.0.0:7300", "[::]:7300", "*:7300", "decode-0:0"])
def test_p66_nobody_connects_to_a_wildcard_or_to_port_0(text: str) -> None:
    """An address that is good to bind and reaches nobody must not look like a peer that is down."""
    parse_address(text)
    with pytest.raises(ValueError, match=r"is no address"):
        parse_peer_address(text)


def test_p66_p07_loopback_and_wildcard_are_recognised() -> None:
    """Whether strangers can reach an address decides what is refused at start."""
    assert all(parse_address(text).is_loopback for text in ("127.0.0.1:1", "127.8.8.8:1", "[::1]:1", "localhost:1"))
    assert not any(parse_address(text).is_loopback for text in ("10.0.0.1:1", "0.0.0.0:1", "*:1", "x:1"))
    assert all(parse_address(text).is_wildcard for text in ("0.0.0.0:1", "[::]:1", "*:1"))
    assert not any(parse_address(text).is_wildcard for text in ("127.0.0.1:1", "localhost:1"))


def test_inproc_is_an_endpoint_and_no_address() -> None:
    """A configuration must not name what only tests can reach."""
    assert parse_endpoint("inproc://a/b") == parse_peer_endpoint("inproc://a/b") == InprocAddress("a/b")
    assert str(parse_endpoint("inproc://a")) == "inproc://a"
    assert parse_endpoint("x:1") == parse_peer_endpoint("x:1") == Address("x", 1)
    with pytest.raises(ValueError, match="'inproc' is not a scheme"):
        parse_address("inproc://a:1")
    with pytest.raises(ValueError, match="an inproc name has"):
        parse_endpoint("inproc://")


async def test_p82_a_name_resolves_to_the_family_that_both_sides_take() -> None:
    """Libzmq does not resolve what it binds, and a peer that takes another family never arrives."""
    with trio.fail_after(10):
        assert await resolve(Address("localhost", 7300)) == Address("127.0.0.1", 7300)
        assert await resolve(Address("*", 7300)) == Address("0.0.0.0", 7300)
        assert await resolve(Address("::1", 7300)) == Address("::1", 7300)


async def test_p82_an_unknown_name_is_an_error_with_the_resolvers_words() -> None:
    """'No such device' tells nobody that a name could not be resolved."""
    with trio.fail_after(30), pytest.raises(OSError, match=r"cannot resolve 'nosuch\.invalid' of nosuch\.invalid:1"):
        await resolve(Address("nosuch.invalid", 1))


async def test_a_name_with_both_families_resolves_to_ipv4() -> None:
    """The order of a resolver's answers differs from host to host; ours must not."""

    class Resolver(trio.abc.HostnameResolver):
        async def getaddrinfo(self, host, port, family=0, type=0, proto=0, flags=0):  # type: ignore[no-untyped-def] # noqa: A002
            v6 = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fd00::1", port, 0, 0))
            return [v6, (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", port))][: 2 if host == b"both" else 1]

        async def getnameinfo(self, sockaddr, flags):  # type: ignore[no-untyped-def]
            raise NotImplementedError

    trio.socket.set_custom_hostname_resolver(Resolver())
    assert await resolve(Address("both", 1)) == Address("10.0.0.1", 1)
    assert await resolve(Address("six", 1)) == Address("fd00::1", 1)
