"""Which weights an engine of somebody else runs: a text that changes with them. Knows files."""

from __future__ import annotations

from pathlib import Path

from quire.errors import ConfigError


def weights_of(model: str) -> str:
    """Of a directory, or of a model that the hub's library has downloaded. Every byte is read.
    Raises ConfigError."""
    from quire.models import fingerprint

    directory = Path(model)
    if not directory.is_dir():
        directory = _downloaded(model)
    return fingerprint(directory)


def _downloaded(model: str) -> Path:
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, local_files_only=True))
    except Exception as error:  # whatever the hub's library raises
        raise ConfigError(
            f"the files of {model} are not here, so its weights cannot be told from others': give "
            "model_fingerprint, a text that changes with the weights"
        ) from error
