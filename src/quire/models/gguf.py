"""A GGUF file becomes a directory of safetensors, once; found again by the file's own digest.

The conversion runs in a process of its own (quire.models.converter): it takes a few times the
model's size in memory, and transformers prints as it goes.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

from quire.errors import ModelError
from quire.models.cache import build_once, cache_dir, no_progress
from quire.models.header import read_header
from quire.progress import Share

_READ_BYTES = 1 << 24
_DIGEST_DIGITS = 16
_HASH_SHARE = 0.05
"""Of the progress reported for one file."""


def convert_gguf(source: Path, cache: Path | None = None, progress: Share | None = None) -> Path:
    """The directory of safetensors that holds what `source` holds: in float16 or bfloat16 where the
    file has it so, else in float32. Raises ModelError."""
    report = progress or no_progress
    if "rope_freqs.weight" in read_header(source).tensors:
        raise ModelError(
            f"{source} holds rope_freqs.weight, which transformers ignores, so that long contexts "
            "would be computed wrongly: give the model as a directory of safetensors instead"
        )
    digest = file_digest(source, lambda what, done: report(what, _HASH_SHARE * done))
    target = converted_dir(source.stem, digest, cache)
    return build_once(target, lambda part: run_converter(source, part, report), report)


def converted_dir(name: str, digest: str, cache: Path | None = None) -> Path:
    """Where the conversion of a file with this name and sha256 is, or would be."""
    plain = re.sub(r"[^\w.+-]", "_", name).lstrip(".")
    return (cache or cache_dir()) / "models" / f"{plain}-{digest[:_DIGEST_DIGITS]}"


def file_digest(path: Path, progress: Share = no_progress) -> str:
    """sha256 in hex. Raises ModelError if the file cannot be read."""
    digest, done_bytes = hashlib.sha256(), 0
    try:
        size = max(1, path.stat().st_size)
        with path.open("rb", buffering=0) as file:
            while block := file.read(_READ_BYTES):
                digest.update(block)
                done_bytes += len(block)
                progress(f"reading {path.name}", min(1.0, done_bytes / size))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()


def run_converter(source: Path, target: Path, progress: Share) -> None:
    """Fill the empty directory `target` from `source`, in a child process. Raises ModelError.

    The child ends when its standard input does: it does not outlive this process.
    """
    command = [sys.executable, "-m", "quire.models.converter", str(source), str(target)]
    with tempfile.TemporaryFile() as noise:
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=noise
        )
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            error = _follow(child.stdout, progress)
            status = child.wait()
        finally:
            child.kill()
            child.wait()
            child.stdin.close()
            child.stdout.close()
        if error is None and status:
            error = _last_line(noise) or f"the converter ended with status {status}"
    if error is not None:
        raise ModelError(f"{source} cannot be converted: {error}")


def _follow(lines: IO[bytes], progress: Share) -> str | None:
    """Pass on the child's reports; the error it reported, if any."""
    error = None
    for line in lines:
        report = json.loads(line)
        if "error" in report:
            error = str(report["error"])
        else:
            done = _HASH_SHARE + (1 - _HASH_SHARE) * float(report["done"])
            progress(str(report["what"]), done)
    return error


def _last_line(noise: IO[bytes]) -> str:
    noise.seek(0)
    lines = noise.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""
