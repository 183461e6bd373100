"""A slot of the staging buffer, as an engine fills it: straight from its own memory, without a copy in between.

A slot that was not written is never sent, and one that was sent can no longer be written.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from typing import Any

from kvpd.errors import LocalProtocolError

_NOT_CONTIGUOUS = "the value is not contiguous, and a slot is filled without a copy in between"


class Slot:
    """Room for one chunk: exactly its bytes.

    `slot[:] = value` takes bytes, memoryviews, numpy arrays of any type and torch tensors on the CPU, all of them
    contiguous. `slot.view` is the memory itself, for whoever fills it in place.
    """

    def __init__(self, region: mmap.mmap, offset: int, length: int) -> None:
        self._view: memoryview | None = memoryview(region)[offset : offset + length]
        self._length = length
        self._written = False

    def __len__(self) -> int:
        return self._length

    @property
    def view(self) -> memoryview:
        """The chunk's bytes, writable, until the stage moves past them. Who asks for it is trusted to fill it.

        Raises:
            LocalProtocolError: the slot was sent already.
        """
        view = self._checked()
        self._written = True
        return view

    @property
    def is_written(self) -> bool:
        """Whether it holds, for all we know, its chunk."""
        return self._written

    def __setitem__(self, where: slice, value: Any) -> None:
        """Fill it.

        Raises:
            LocalProtocolError: the length differs, the value is not contiguous or not in this host's memory, only a
                part of the slot is meant, or the slot was sent already.
        """
        if where not in (slice(None), slice(0, self._length)):
            raise LocalProtocolError("a slot is filled whole: slot[:] = value")
        view = self._checked()
        if hasattr(value, "data_ptr"):
            self._fill_from_address(view, *_tensor_memory(value))
        elif hasattr(value, "__array_interface__"):
            self._fill_from_address(view, *_array_memory(value))
        else:
            source = _buffer_memory(value)
            self._check_length(source.nbytes)
            view[:] = source
        self._written = True

    def revoke(self) -> None:
        """It is the daemon's again."""
        view, self._view = self._view, None
        if view is not None:
            with contextlib.suppress(BufferError):  # an array of the engine's still refers to it
                view.release()

    def _checked(self) -> memoryview:
        if self._view is None:
            raise LocalProtocolError("this slot was sent already, or its transfer was left")
        return self._view

    def _check_length(self, length: int) -> None:
        if length != self._length:
            raise LocalProtocolError(f"{length} bytes for a chunk of {self._length} bytes")

    def _fill_from_address(self, view: memoryview, address: int, length: int) -> None:
        self._check_length(length)
        # A view of its own, so that nobody can unmap the slot while memmove runs without the interpreter's lock.
        with memoryview(view) as guard:
            ctypes.memmove(ctypes.addressof(ctypes.c_char.from_buffer(guard)), address, length)


def _tensor_memory(tensor: Any) -> tuple[int, int]:
    """Address and length of a torch tensor, known by its methods alone: torch is not imported here."""
    if tensor.device.type != "cpu":
        raise LocalProtocolError(f"the tensor is on {tensor.device}; this buffer is on the CPU")
    if not tensor.is_contiguous():
        raise LocalProtocolError(_NOT_CONTIGUOUS)
    return int(tensor.data_ptr()), int(tensor.numel() * tensor.element_size())


def _array_memory(array: Any) -> tuple[int, int]:
    """Address and length of a numpy array, whatever its type: buffers do not know them all (bfloat16, for one)."""
    interface = array.__array_interface__
    if interface.get("strides") is not None:
        raise LocalProtocolError(_NOT_CONTIGUOUS)
    return int(interface["data"][0]), int(array.nbytes)


def _buffer_memory(value: Any) -> memoryview:
    try:
        view = memoryview(value)
    except (TypeError, ValueError, BufferError) as exc:
        raise LocalProtocolError(f"a {type(value).__name__} has no memory to copy from: {exc}") from exc
    if not view.c_contiguous:
        raise LocalProtocolError(_NOT_CONTIGUOUS)
    if not view.nbytes:
        return memoryview(b"")
    try:
        return view.cast("B")
    except TypeError as exc:
        raise LocalProtocolError(f"a buffer of format {view.format!r} cannot be read as bytes") from exc
