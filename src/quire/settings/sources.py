"""Where settings come from: default < file < environment < command line.

Every value remembers its origin, so that a complaint names what to change. Knows nothing of the
machine: "auto" stays auto here.
"""

from __future__ import annotations

import difflib
import enum
import stat
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from quire.errors import ConfigError
from quire.settings.kinds import AUTO, Value
from quire.settings.options import OPTIONS, PREFIX, Option, Settings

CONFIG_VARIABLE = "QUIRE_CONFIG"
CACHE_VARIABLE = "QUIRE_CACHE_DIR"
_OTHER_VARIABLES = (CONFIG_VARIABLE, CACHE_VARIABLE)
_LONGEST_SHOWN = 60


class Source(enum.Enum):
    DEFAULT = "default"
    FILE = "file"
    ENVIRONMENT = "environment"
    COMMAND_LINE = "command line"


@dataclass(frozen=True, slots=True)
class Origin:
    source: Source
    where: str
    """What a person would change: "/etc/quire.toml: page_size", "QUIRE_PORT", "--port"."""

    @property
    def is_given(self) -> bool:
        return self.source is not Source.DEFAULT


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings as given, before "auto" is worked out."""

    settings: Settings
    origins: Mapping[str, Origin]
    warnings: tuple[str, ...] = ()

    def where(self, name: str) -> str:
        """ "page_size", with what set it if something did."""
        origin = self.origins[name]
        return f"{name} ({origin.where})" if origin.is_given else name


@dataclass(frozen=True, slots=True)
class _Given:
    value: Value
    origin: Origin


def load(
    flags: Mapping[str, str | None], environ: Mapping[str, str], config: Path | None = None
) -> Loaded:
    """`flags` are texts by option name, None where not given; `config` is the file, otherwise
    QUIRE_CONFIG names it. Raises ConfigError."""
    if config is None and environ.get(CONFIG_VARIABLE):
        config = Path(environ[CONFIG_VARIABLE])
    given: dict[str, _Given] = {}
    warnings: list[str] = []
    if config is not None:
        given |= _from_file(config)
        warnings += _exposed_keys(config, given)
    given |= _from_environment(environ)
    warnings += _unknown_variables(environ)
    given |= _from_flags(flags)
    default = Origin(Source.DEFAULT, "default")
    return Loaded(
        Settings(**{name: item.value for name, item in given.items()}),  # type: ignore[arg-type]
        {name: given[name].origin if name in given else default for name in OPTIONS},
        tuple(warnings),
    )


def _from_file(path: Path) -> dict[str, _Given]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read the configuration {str(path)!r} ({error.strerror}): "
            f"check --config and {CONFIG_VARIABLE}"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is not TOML ({error}): write one `option = value` per line"
        ) from error
    given = {}
    for key, value in content.items():
        if isinstance(value, dict):
            raise ConfigError(
                f"{path}: [{key}] is a table, and options are not grouped: "
                "write `option = value` at the top"
            )
        if key not in OPTIONS:
            raise ConfigError(f"{path}: {key!r} is not an option: {_nearest(key)}")
        origin = Origin(Source.FILE, f"{path}: {key}")
        given[key] = _Given(_read_toml(OPTIONS[key], value, origin), origin)
    return given


def _from_environment(environ: Mapping[str, str]) -> dict[str, _Given]:
    given = {}
    for name, option in OPTIONS.items():
        text = environ.get(option.variable)
        if text is not None:
            origin = Origin(Source.ENVIRONMENT, option.variable)
            given[name] = _Given(_read_text(option, text, origin), origin)
    return given


def _from_flags(flags: Mapping[str, str | None]) -> dict[str, _Given]:
    given = {}
    for name, text in flags.items():
        option = OPTIONS[name]
        assert option.flag is not None, name
        if text is not None:
            origin = Origin(Source.COMMAND_LINE, option.flag)
            given[name] = _Given(_read_text(option, text, origin), origin)
    return given


def _read_text(option: Option, text: str, origin: Origin) -> Value:
    if not text:
        raise ConfigError(
            f"{option.name}: {origin.where} is empty: give it a value or do not set it"
        )
    if option.auto is not None and text == AUTO:
        return None
    try:
        return option.kind.parse(text)
    except ConfigError as error:
        raise _wrong(option, text, origin, error) from None


def _read_toml(option: Option, value: object, origin: Origin) -> Value:
    if isinstance(value, str):
        if not value:
            raise ConfigError(f"{origin.where} is empty: give it a value or remove the line")
        if option.auto is not None and value == AUTO:
            return None
    try:
        return option.kind.accept(value)
    except ConfigError as error:
        raise _wrong(option, value, origin, error) from None


def _wrong(option: Option, value: object, origin: Origin, fix: ConfigError) -> ConfigError:
    text = str(value)
    shown = repr(text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…")
    name = "" if origin.where.endswith(option.name) else f"{option.name}: "
    is_what = "cannot be used" if option.is_secret else f"is {shown}"
    return ConfigError(f"{name}{origin.where} {is_what}: {fix}")


def _nearest(key: str, *, variables: bool = False) -> str:
    names = [option.variable if variables else name for name, option in OPTIONS.items()]
    wanted = key.upper() if variables else key.lower().replace("-", "_")
    close = difflib.get_close_matches(wanted, names, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"{hint}`quire config` lists all options"


def _unknown_variables(environ: Mapping[str, str]) -> Iterator[str]:
    """Others may have variables that begin like ours, so these are not errors."""
    known = {option.variable for option in OPTIONS.values()} | set(_OTHER_VARIABLES)
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in known:
            yield f"{name} is set and means nothing to Quire: {_nearest(name, variables=True)}"


def _exposed_keys(path: Path, given: Mapping[str, _Given]) -> Iterator[str]:
    keys = [name for name in given if OPTIONS[name].is_secret]
    if keys and path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        yield (
            f"{path} holds {' and '.join(keys)} and can be read by others on this machine: "
            f"chmod 600 {path}"
        )
