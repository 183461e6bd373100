"""What `kv_connector_extra_config` may say, checked once and whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs


@attrs.frozen
class Settings:
    """The connector's settings. Sockets are the paths where the daemons' engine links listen."""

    sender_socket: str = ""
    receiver_socket: str = ""
    chunk_tokens: int = 256
    load_timeout_s: float = 30.0  # from when the decode engine first sees a request until its KV must be here
    connect_timeout_s: float = 5.0
    model: str = ""  # how the fingerprint calls the model; empty: as vLLM does

    @classmethod
    def read(cls, extra: Mapping[str, Any], *, is_producer: bool, is_consumer: bool) -> Settings:
        """Read vLLM's dictionary.

        Raises:
            ValueError: a key is unknown or a value cannot be used; everything wrong is named.
        """
        known = {field.name: field for field in attrs.fields(cls)}
        problems = [
            f"{key} is no setting of this connector; there are {', '.join(known)}" for key in extra if key not in known
        ]
        values: dict[str, Any] = {}
        for name, field in known.items():
            value = extra.get(name, field.default)
            kind = type(field.default)
            if kind is float and isinstance(value, int) and not isinstance(value, bool):
                value = float(value)
            if type(value) is not kind:
                problems.append(f"{name} = {value!r} must be of type {kind.__name__}")
            elif kind in (int, float) and not value > 0:
                problems.append(f"{name} = {value!r} must be more than 0")
            values[name] = value
        if is_producer and not values["sender_socket"]:
            problems.append("sender_socket must be set where this engine prefills for others")
        if is_consumer and not values["receiver_socket"]:
            problems.append("receiver_socket must be set where this engine decodes what others prefilled")
        if problems:
            raise ValueError("kv_connector_extra_config: " + "; ".join(problems))
        return cls(**values)
