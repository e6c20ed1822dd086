"""The flags of `quire serve` and `quire config`: those options of quire.settings that have one.

Flags are taken as text and read by quire.settings, like the environment and the file, so that a
wrong value gets the same sentence wherever it was given.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from quire.settings import OPTIONS, Loaded, load

PANELS = {
    "What is cached, and where": (
        "page_size device_memory host_memory store write_policy prefetch_policy audit"
    ),
    "Where clients find it": (
        "host port served_model_name tool_parser reasoning_parser strict log_requests otlp record"
    ),
    "Prefill and decode on separate servers": (
        "role prefill peers peer_host peer_port peer_transport router kv_events"
    ),
}
"""Of the help, and in which order flags stand there; all others come before them."""
LAST = [name for names in PANELS.values() for name in names.split()]
ALL = [name for name, option in OPTIONS.items() if option.has_flag and name not in LAST] + LAST
CONFIG = "config"

WHERE_THE_REST_IS = (
    "More options (api_key, admin_key, max_context, max_running, …) are set in a file or in the "
    "environment: [bold]quire config[/bold] lists them all."
)


@dataclass(frozen=True, slots=True)
class Given:
    """What a command line says of the options: text, None where it says nothing."""

    texts: dict[str, str | None]
    config: Path | None = None

    def loaded(self) -> Loaded:
        """With the environment and the file. Raises ConfigError."""
        return load(self.texts, os.environ, self.config)


def taking(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command with these flags; without names with all, and `--config`. It is called with what
    was given, as Given, and with the options that it has besides."""

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        _, *own = inspect.signature(command, eval_str=True).parameters.values()

        @functools.wraps(command)
        def parsed(**arguments: Any) -> None:
            besides = {each.name: arguments.pop(each.name) for each in own}
            command(_given(arguments), **besides)

        flags = [*(_parameter(name) for name in names or ALL), *([] if names else [_config()])]
        parsed.__signature__ = inspect.Signature([*flags, *own])  # type: ignore[attr-defined]
        parsed.__annotations__ = {each.name: each.annotation for each in (*flags, *own)}
        return parsed

    return decorated


def _given(arguments: Mapping[str, Any]) -> Given:
    def texts() -> Iterator[tuple[str, str | None]]:
        for name, value in arguments.items():
            if isinstance(value, list):  # `--store`, once for each: as one value, as in a file
                yield name, " ".join(value) or None
            elif name != CONFIG:
                yield name, str(value).lower() if isinstance(value, bool) else value

    return Given(dict(texts()), arguments.get(CONFIG))


def _parameter(name: str) -> inspect.Parameter:
    option = OPTIONS[name]
    assert option.flag is not None
    panel = next((panel for panel, names in PANELS.items() if name in names.split()), None)
    kind: Any = {"store": list[str], "log_requests": bool}.get(name, str)
    default = f"auto, {option.auto}" if option.auto else option.kind.show(option.default)
    about: Any = typer.Option(
        option.flag,
        metavar=option.kind.metavar,
        help=f"{option.help} [dim]\\[{default}][/dim]",
        show_default=False,
        rich_help_panel=panel,
    )
    if kind is bool:
        about = typer.Option(
            f"{option.flag}/--no-{option.flag[2:]}",
            help=option.help,
            show_default=False,
            rich_help_panel=panel,
        )
    return _optional(name, Annotated[kind | None, about])


def _config() -> inspect.Parameter:
    about = typer.Option(
        "--config",
        metavar="FILE",
        help="TOML, one `option = value` per line. [dim]\\[QUIRE_CONFIG, else none][/dim]",
        show_default=False,
    )
    return _optional(CONFIG, Annotated[Path | None, about])


def _optional(name: str, annotation: Any) -> inspect.Parameter:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Parameter(name, kind, default=None, annotation=annotation)


IsChild = Annotated[
    bool,
    typer.Option(
        "--child", hidden=True, help="Ends with standard input; says in JSON that it is ready."
    ),
]
