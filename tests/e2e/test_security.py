"""What an attacker would look for first."""

from __future__ import annotations

import ast
import os
import stat
import subprocess
import sys
from pathlib import Path

import kvpd
from kvpd.core.messages import PROTOCOL_VERSION, Hello, HostIdentity, Welcome

from .control import Stranger
from .daemons import DEADLINE_S, Fleet
from .payloads import make_request, receive, send

PACKAGE = Path(kvpd.__file__).parent
MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml"}
CALLS = {"eval", "exec", "compile", "__import__"}
METHODS = {"recv_pyobj", "send_pyobj", "unpackb_ext", "allow_pickle"}


def forbidden_in(tree: ast.AST) -> list[str]:
    """Whatever in a module could turn bytes into behaviour."""
    found: list[str] = []
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found += [name.name for name in names if name.name.split(".")[0] in MODULES]
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in MODULES:
                found.append(module)
            case ast.Call(func=ast.Name(id=name)) if name in CALLS:
                found.append(name)
            case ast.Attribute(value=ast.Name(id="torch" | "numpy" | "np"), attr="load"):
                found.append("load")
            case ast.Attribute(attr=name) if name in METHODS:
                found.append(name)
            case _:
                pass
    return found


def test_no_bytes_are_ever_executed() -> None:
    """Another project's connectors unpickled what strangers sent to a port; that is remote execution."""
    modules = list(PACKAGE.rglob("*.py"))
    assert len(modules) > 50
    assert {str(path): found for path in modules if (found := forbidden_in(ast.parse(path.read_bytes())))} == {}
    assert forbidden_in(ast.parse("import pickle; eval(x); torch.load(f); s.recv_pyobj()")) == [
        "pickle",
        "eval",
        "load",
        "recv_pyobj",
    ]


def test_the_right_to_write_never_gets_into_a_log(fleet: Fleet) -> None:
    """Whoever has the rkey can write into the receiver's memory, and logs go everywhere."""
    loud = ["--log-level", "debug"]
    receiver = fleet.start(
        "receiver",
        "r",
        {"buffer_size": "1MiB", "chunk_bytes": "64KiB", "control_address": "127.0.0.1:0"},
        options=loud,
        environment={"UCX_LOG_LEVEL": "warn"},
    )
    sender = fleet.start("sender", "s", {"staging_size": "1MiB", "chunk_bytes": "64KiB"}, options=loud).wait_ready()
    receiver.wait_ready()
    request = make_request("secret", 4)
    with sender.sender_link() as prefill, receiver.receiver_link() as decode:
        send(prefill, request, receiver.address)
        assert receive(decode, "secret") == request.hashes
    with Stranger(receiver.address, b"stranger") as stranger:
        stranger.send(Hello(7, 0, 1, PROTOCOL_VERSION, "stranger", 65536, "", 0, HostIdentity()))
        welcome = stranger.receive()
    assert isinstance(welcome, Welcome)
    receiver.wait_for("session_opened", sender="stranger")
    (region,) = welcome.regions
    assert len(region.rkey) > 8
    for daemon in (receiver, sender):
        daemon.stop()
        assert not [field for line in daemon.lines for field in line if "rkey" in field]
        for spelling in (region.rkey.hex(), repr(region.rkey)[2:-1], region.worker_address.hex()):
            assert spelling not in daemon.text


def test_only_its_own_user_may_connect_an_engine(fleet: Fleet) -> None:
    """The socket gives whoever connects the memory of every request."""
    for daemon in fleet.pair():
        found = daemon.socket.stat()
        assert stat.S_IMODE(found.st_mode) == 0o600
        assert found.st_uid == os.getuid()


def test_an_engine_needs_nothing_but_the_client() -> None:
    """A model server's environment has its own ideas of trio, zmq, torch and structlog, or none of them."""
    blocked = "import sys; sys.modules.update(dict.fromkeys(['trio', 'zmq', 'torch', 'structlog']))"
    program = f"{blocked}; import kvpd.client; kvpd.client.connect_sender"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=DEADLINE_S)
