"""The flags of `quire serve` and `quire config`: those options of quire.settings that have one.

Flags are taken as text and read by quire.settings, like the environment and the file, so that a
wrong value gets the same sentence wherever it was given.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from quire.settings import OPTIONS, Loaded, load

TIERS = "What is cached, and where"
SERVER = "Where clients find it"
PEERS = "Prefill and decode on separate servers"

WHERE_THE_REST_IS = (
    "More options (api_key, admin_key, max_context, max_running, …) are set in a file or in the "
    "environment: [bold]quire config[/bold] lists them all."
)


def _flag(name: str, panel: str | None = None) -> Any:
    option = OPTIONS[name]
    assert option.flag is not None
    default = f"auto, {option.auto}" if option.auto else option.kind.show(option.default)
    return typer.Option(
        option.flag,
        metavar=option.kind.metavar,
        help=f"{option.help} [dim]\\[{default}][/dim]",
        show_default=False,
        rich_help_panel=panel,
    )


Model = Annotated[str | None, _flag("model")]
Device = Annotated[str | None, _flag("device")]
Dtype = Annotated[str | None, _flag("dtype")]
Forward = Annotated[str | None, _flag("forward")]
Attention = Annotated[str | None, _flag("attention")]
CudaGraphs = Annotated[str | None, _flag("cuda_graphs")]
Speculate = Annotated[str | None, _flag("speculate")]
DraftTokens = Annotated[str | None, _flag("draft_tokens")]
Tp = Annotated[str | None, _flag("tp")]
PageSize = Annotated[str | None, _flag("page_size", TIERS)]
DeviceMemory = Annotated[str | None, _flag("device_memory", TIERS)]
HostMemory = Annotated[str | None, _flag("host_memory", TIERS)]
Store = Annotated[list[str] | None, _flag("store", TIERS)]
WritePolicy = Annotated[str | None, _flag("write_policy", TIERS)]
PrefetchPolicy = Annotated[str | None, _flag("prefetch_policy", TIERS)]
Audit = Annotated[str | None, _flag("audit", TIERS)]
Host = Annotated[str | None, _flag("host", SERVER)]
Port = Annotated[str | None, _flag("port", SERVER)]
ServedModelName = Annotated[str | None, _flag("served_model_name", SERVER)]
ToolParser = Annotated[str | None, _flag("tool_parser", SERVER)]
ReasoningParser = Annotated[str | None, _flag("reasoning_parser", SERVER)]
Strict = Annotated[str | None, _flag("strict", SERVER)]
LogRequests = Annotated[
    bool | None,
    typer.Option(
        "--log-requests/--no-log-requests",
        help=OPTIONS["log_requests"].help,
        show_default=False,
        rich_help_panel=SERVER,
    ),
]
Otlp = Annotated[str | None, _flag("otlp", SERVER)]
Record = Annotated[str | None, _flag("record", SERVER)]
Role = Annotated[str | None, _flag("role", PEERS)]
Prefill = Annotated[str | None, _flag("prefill", PEERS)]
Peers = Annotated[str | None, _flag("peers", PEERS)]
PeerHost = Annotated[str | None, _flag("peer_host", PEERS)]
PeerTransport = Annotated[str | None, _flag("peer_transport", PEERS)]
Router = Annotated[str | None, _flag("router", PEERS)]
KvEvents = Annotated[str | None, _flag("kv_events", PEERS)]
PeerPort = Annotated[str | None, _flag("peer_port", PEERS)]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="TOML, one `option = value` per line. [dim]\\[QUIRE_CONFIG, else none][/dim]",
        show_default=False,
    ),
]

Child = Annotated[
    bool,
    typer.Option(
        "--child", hidden=True, help="Ends with standard input; says in JSON that it is ready."
    ),
]


def joined(stores: list[str] | None) -> str | None:
    """As one value, as it is written in a file: the flag is given once for each store."""
    return " ".join(stores) if stores else None


def loaded(arguments: Mapping[str, Any]) -> Loaded:
    """From a command's arguments (its `locals()`), the environment and the file."""
    flags = {name: arguments[name] for name, option in OPTIONS.items() if option.has_flag}
    if flags["log_requests"] is not None:  # a switch, read like the rest
        flags["log_requests"] = str(flags["log_requests"]).lower()
    flags["store"] = joined(flags["store"])
    return load(flags, os.environ, arguments["config"])
