"""Which weights an engine of somebody else runs: a text that changes with them. Knows files."""

from __future__ import annotations

from pathlib import Path

from quire.errors import ConfigError, ModelError

_INSTEAD = "give model_fingerprint, a text that changes with the weights"


def weights_of(model: str, revision: str | None = None, downloads: str | None = None) -> str:
    """Of a directory, or of a model that the hub's library has downloaded: this revision of it, to
    this folder. Every byte is read. Raises ConfigError."""
    from quire.models import fingerprint

    directory = Path(model)
    if not directory.is_dir():
        directory = _downloaded(model, revision, downloads)
    try:
        return fingerprint(directory)
    except ModelError as error:
        raise ConfigError(
            f"the weights of {model} cannot be told from others' by their files ({error}): "
            f"{_INSTEAD}"
        ) from error


def _downloaded(model: str, revision: str | None, downloads: str | None) -> Path:
    try:
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(model, revision=revision, cache_dir=downloads, local_files_only=True)
        )
    except Exception as error:  # whatever the hub's library raises
        raise ConfigError(
            f"the files of {model} are not here, so its weights cannot be told from others': "
            f"{_INSTEAD}"
        ) from error
