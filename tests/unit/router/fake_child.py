"""A process that plays `quire serve --child` for `quire pd`: a fake server that says it is ready.

Started with a place for its process id, and the arguments of `quire serve`.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path

signal.signal(signal.SIGINT, lambda *_: sys.exit(0))  # while the rest is being imported, too

# ruff: noqa: E402
from quire.engine.messages import EngineInfo, TierStatus
from quire.own_server import announce, end_with_standard_input
from unit.router.fakes import FakeServer


async def main(folder: Path, arguments: list[str]) -> None:
    role = arguments[arguments.index("--role") + 1]
    assert os.environ["QUIRE_PEER_SECRET"]
    assert os.environ["QUIRE_ADMIN_KEY"]
    sys.stderr.write(f"quire: loading for {role}\n")
    if (folder / f"{role}-fails").exists():
        sys.stderr.write("quire: device_memory holds 3 pages: give it more\n")
        sys.exit(2)
    fake = FakeServer(role)
    fake._port = int(arguments[arguments.index("--port") + 1])
    await fake.start()
    end = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, end.set)
    (folder / role).write_text(str(os.getpid()))
    tiers = [TierStatus("device", 1024, 100, 0, 0), TierStatus("host", 1024, 200, 0, 0)]
    announce(
        fake.url,
        EngineInfo("m", "f", "cpu", "float32", 1, 16, 9, 99, tiers, "", role=role, peer=fake.peer),
    )
    await end.wait()
    await fake.stop()


end_with_standard_input()
asyncio.run(main(Path(sys.argv[1]), sys.argv[2:]))
