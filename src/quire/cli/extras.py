"""What a command needs beyond the library itself, as pip installs it: `quire[serve]` and so on."""

from __future__ import annotations

import importlib.util

from quire.errors import ConfigError

SERVE = ("transformers", "safetensors", "fastapi", "uvicorn", "prometheus_client")
ROUTE = ("fastapi", "uvicorn", "prometheus_client", "httpx")
CLIENT = ("httpx",)
PLOTS = ("matplotlib",)


def needs(extra: str, packages: tuple[str, ...]) -> None:
    """Raises ConfigError, with what to install, unless all of them are there."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"this needs {' and '.join(missing)}, which pip did not install with Quire alone: "
            f"pip install 'quire[{extra}]'"
        )
