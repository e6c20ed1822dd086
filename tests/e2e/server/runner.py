"""A real server in a process of its own: its two configurations as JSON, its URL on stdout."""

import asyncio
import json
import logging
import sys

import msgspec

from quire import logs
from quire.engine.config import EngineConfig
from quire.errors import QuireError
from quire.server.config import ServerConfig
from quire.server.run import serve


def main(engine: dict[str, object], server: dict[str, object]) -> int:
    logs.configure(logging.WARNING)
    try:
        return asyncio.run(
            serve(
                msgspec.convert(engine, EngineConfig),
                ServerConfig(**server),
                on_ready=lambda url, info: print("READY", url, flush=True),
            )
        )
    except QuireError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":  # the engine's process imports the main module again
    sys.exit(main(*map(json.loads, sys.argv[1:])))
