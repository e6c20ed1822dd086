"""Decoders of typed messages, made by one thread at a time.

What the fields of a type are is found out when a decoder first meets it, in Python, so that threads
take turns meanwhile: a second one that meets the same type then uses what is half known, and the
process crashes. So decoders of our types are made here and nowhere else (a test looks), behind one
lock, and where it can be when a module is imported.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import Any, TypeVar, overload

import msgspec

Message = TypeVar("Message")

_making = threading.Lock()


@overload
def msgpack_decoder(kind: type[Message]) -> msgspec.msgpack.Decoder[Message]: ...
@overload
def msgpack_decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]: ...
def msgpack_decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    with _making:
        return _msgpack_decoder(kind)


@overload
def json_decoder(kind: type[Message]) -> msgspec.json.Decoder[Message]: ...
@overload
def json_decoder(kind: Any) -> msgspec.json.Decoder[Any]: ...
def json_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    with _making:
        return _json_decoder(kind)


@cache
def _msgpack_decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


@cache
def _json_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)
