"""Where settings come from: default < file < environment < command line.

Every value remembers its origin, so that a complaint names what to change. Knows nothing of the
machine: "auto" stays auto here.
"""

from __future__ import annotations

import difflib
import enum
import stat
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.errors import ConfigError
from quire.settings.options import OPTIONS, PREFIX, Option, Settings
from quire.settings.values import AUTO, Value

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
    option: Option
    value: object
    """Text, or from a file what TOML makes of it."""
    origin: Origin

    @property
    def name(self) -> str:
        """For a complaint: what set it, which may name the option itself."""
        where = self.origin.where
        return where if where.endswith(self.option.name) else f"{self.option.name}: {where}"

    def read(self) -> Value:
        option, in_file = self.option, self.origin.source is Source.FILE
        if self.value == "":
            leave = "remove the line" if in_file else "do not set it"
            raise ConfigError(f"{self.name} is empty: give it a value or {leave}")
        if option.auto is not None and self.value == AUTO:
            return None
        try:
            return option.kind.accept(self.value) if in_file else option.kind.parse(str(self.value))
        except ConfigError as fix:
            raise ConfigError(f"{self.name} {self._is_what()}: {fix}") from None

    def _is_what(self) -> str:
        if self.option.is_secret:
            return "cannot be used"
        text = str(self.value)
        return f"is {text if len(text) <= _LONGEST_SHOWN else f'{text[:_LONGEST_SHOWN]}…'!r}"


def load(
    flags: Mapping[str, str | None], environ: Mapping[str, str], config: Path | None = None
) -> Loaded:
    """`flags` are texts by option name, None where not given; `config` is the file, otherwise
    QUIRE_CONFIG names it. Raises ConfigError."""
    if config is None and environ.get(CONFIG_VARIABLE):
        config = Path(environ[CONFIG_VARIABLE])
    in_file = [] if config is None else list(_from_file(config))
    values: dict[str, Value] = {}
    origins = dict.fromkeys(OPTIONS, Origin(Source.DEFAULT, "default"))
    for given in (*in_file, *_from_environment(environ), *_from_flags(flags)):
        values[given.option.name] = given.read()
        origins[given.option.name] = given.origin
    warnings = [*_exposed_keys(config, in_file), *_unknown_variables(environ)]
    return Loaded(Settings(**values), origins, tuple(warnings))  # type: ignore[arg-type]


def _from_file(path: Path) -> Iterator[_Given]:
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
    for key, value in content.items():
        if isinstance(value, dict):
            raise ConfigError(
                f"{path}: [{key}] is a table, and options are not grouped: "
                "write `option = value` at the top"
            )
        if key not in OPTIONS:
            raise ConfigError(f"{path}: {key!r} is not an option: {_nearest(key)}")
        yield _Given(OPTIONS[key], value, Origin(Source.FILE, f"{path}: {key}"))


def _from_environment(environ: Mapping[str, str]) -> Iterator[_Given]:
    for option in OPTIONS.values():
        if option.variable in environ:
            origin = Origin(Source.ENVIRONMENT, option.variable)
            yield _Given(option, environ[option.variable], origin)


def _from_flags(flags: Mapping[str, str | None]) -> Iterator[_Given]:
    for name, text in flags.items():
        flag = OPTIONS[name].flag
        assert flag is not None, name
        if text is not None:
            yield _Given(OPTIONS[name], text, Origin(Source.COMMAND_LINE, flag))


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


def _exposed_keys(path: Path | None, given: Sequence[_Given]) -> Iterator[str]:
    keys = [item.option.name for item in given if item.option.is_secret]
    if path is not None and keys and path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        yield (
            f"{path} holds {' and '.join(keys)} and can be read by others on this machine: "
            f"chmod 600 {path}"
        )
