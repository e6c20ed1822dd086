"""How one value of an option is written: as text (environment, command line) and in a TOML file.

A kind turns both into the value, or raises ConfigError with the second half of a sentence: what to
write instead. It knows neither the option's name nor where the value came from.
"""

from __future__ import annotations

import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from quire.engine.draft.kinds import parse_draft
from quire.errors import ConfigError, StoreURLError
from quire.sizes import format_bytes, parse_size
from quire.store.url import redact, split_urls
from quire.web.addresses import parse_peers

Value = str | int | float | bool | enum.Enum | tuple[str, ...] | None

AUTO = "auto"
NONE = "none"

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


class ValueKind(ABC):
    """One way of writing values."""

    metavar: str
    """In help texts."""

    @abstractmethod
    def parse(self, text: str) -> Value:
        """From the environment or the command line."""

    def accept(self, value: object) -> Value:
        """From TOML, where most values are written as strings."""
        if not isinstance(value, str):
            raise ConfigError('write it as text in quotes, such as "..."')
        return self.parse(value)

    def show(self, value: Value) -> str:
        """As a person would write it."""
        plain = self.plain(value)
        if isinstance(plain, list):
            return ",".join(plain) or NONE
        return str(plain).lower() if isinstance(plain, bool) else str(plain)

    def plain(self, value: Value) -> str | int | float | bool | list[str] | None:
        """For JSON."""
        if isinstance(value, enum.Enum):
            return str(value.value)
        return list(value) if isinstance(value, tuple) else value


@dataclass(frozen=True)
class PlainText(ValueKind):
    metavar: str = "TEXT"

    def parse(self, text: str) -> str:
        if not text.isprintable():
            raise ConfigError("write it on one line, without control characters")
        return text


@dataclass(frozen=True)
class OneOf(ValueKind):
    choices: Sequence[str | enum.Enum]

    @property
    def metavar(self) -> str:  # type: ignore[override]
        return "|".join(_name(choice) for choice in self.choices)

    def parse(self, text: str) -> str | enum.Enum:
        for choice in self.choices:
            if _name(choice) == text:
                return choice
        names = [_name(choice) for choice in self.choices]
        raise ConfigError(f"use {', '.join(names[:-1])} or {names[-1]}")


@dataclass(frozen=True)
class Integer(ValueKind):
    minimum: int
    maximum: int | None = None
    example: int = 1
    metavar: str = "N"

    def parse(self, text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise self._wrong() from None
        return self._in_range(number)

    def accept(self, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"write a whole number without quotes, such as {self.example}")
        return self._in_range(value)

    def _in_range(self, number: int) -> int:
        if number < self.minimum or (self.maximum is not None and number > self.maximum):
            raise self._wrong()
        return number

    def _wrong(self) -> ConfigError:
        bounds = f"of at least {self.minimum}"
        if self.maximum is not None:
            bounds = f"from {self.minimum} to {self.maximum}"
        return ConfigError(f"give a whole number {bounds}, such as {self.example}")


@dataclass(frozen=True)
class Size(ValueKind):
    minimum: int = 0
    metavar: str = "SIZE"

    def parse(self, text: str) -> int:
        try:
            size = parse_size(text)
        except ConfigError:
            raise ConfigError("write a number and a unit, such as 20GiB") from None
        return self._in_range(size)

    def accept(self, value: object) -> int:
        if isinstance(value, int) and not isinstance(value, bool):
            return self._in_range(value)
        if not isinstance(value, str):
            raise ConfigError('write a size in quotes, such as "20GiB", or bytes as a number')
        return self.parse(value)

    def show(self, value: Value) -> str:
        assert isinstance(value, int)
        return format_bytes(value)

    def _in_range(self, size: int) -> int:
        if size < self.minimum:
            raise ConfigError(f"give at least {format_bytes(self.minimum)}")
        return size


@dataclass(frozen=True)
class Seconds(ValueKind):
    metavar: str = "SECONDS"

    def parse(self, text: str) -> float:
        try:
            return self._in_range(float(text))
        except ValueError:
            raise ConfigError("give a number of seconds above 0, such as 600") from None

    def accept(self, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError("write a number of seconds without quotes, such as 600")
        return self._in_range(float(value))

    def show(self, value: Value) -> str:
        return f"{value:g} s"

    def _in_range(self, seconds: float) -> float:
        if not (seconds > 0 and math.isfinite(seconds)):
            raise ConfigError("give a number of seconds above 0, such as 600")
        return seconds


@dataclass(frozen=True)
class Switch(ValueKind):
    metavar: str = "true|false"

    def parse(self, text: str) -> bool:
        word = text.lower()
        if word not in _TRUE + _FALSE:
            raise ConfigError("use true or false")
        return word in _TRUE

    def accept(self, value: object) -> bool:
        if not isinstance(value, bool):
            raise ConfigError("write true or false without quotes")
        return value


@dataclass(frozen=True)
class StoreText(ValueKind):
    """A store's URL, or several with blanks between them, the fastest first, or "none". Whether the
    scheme is known is found when it is opened."""

    metavar: str = "URL|none"

    def parse(self, text: str) -> str:
        if text == NONE:
            return NONE
        try:
            return " ".join(url.text for url in split_urls(text))
        except StoreURLError as error:
            raise ConfigError(f"{error}, or none for no store") from None

    def show(self, value: Value) -> str:
        """Without the password, if there is one."""
        return redact(str(value))

    def plain(self, value: Value) -> str | None:
        return None if value is None else self.show(value)


@dataclass(frozen=True)
class DraftText(ValueKind):
    """Who proposes tokens ahead. Whether a head fits is found when it is read."""

    metavar: str = "off|ngram|eagle|eagle-tree|eagle:DIR"

    def parse(self, text: str) -> str:
        parse_draft(text)
        return text


@dataclass(frozen=True)
class Several(ValueKind):
    """Texts with commas between them; a file may hold a list of texts instead."""

    wanted: ClassVar[str]
    """Of a file."""

    def accept(self, value: object) -> Value:
        if isinstance(value, str):
            return self.parse(value)
        if not (isinstance(value, list) and all(isinstance(each, str) for each in value)):
            raise ConfigError(f"write a list of {self.wanted}")
        return self.parse(",".join(value))


@dataclass(frozen=True)
class PeerList(Several):
    """Page servers of other engines: tcp://host:port, or "none"."""

    metavar: str = "tcp://HOST:PORT,…"
    wanted = 'addresses, such as ["tcp://10.0.0.5:7000"]'

    def parse(self, text: str) -> tuple[str, ...]:
        return () if text in ("", NONE) else parse_peers(text)


@dataclass(frozen=True)
class NameList(Several):
    metavar: str = "NAME,…"
    wanted = 'names, such as ["small", "default"]'

    def parse(self, text: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
        if not all(names):
            raise ConfigError("write names with commas between them, such as small,default")
        return names


def _name(choice: str | enum.Enum) -> str:
    return str(choice.value) if isinstance(choice, enum.Enum) else choice
