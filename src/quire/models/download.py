"""Models by their ids on the hub: NAME/NAME, and @REVISION behind it.

What is in huggingface_hub's own cache is taken from there, without the network; else it is
downloaded, weights as safetensors only, nothing that would be executed. Its environment variables
(HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE) apply. Knows no format.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from quire.errors import ModelError
from quire.models.cache import no_progress
from quire.progress import Share

_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(@[\w./-]+)?")
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


def is_hub_id(model: str) -> bool:
    return _ID.fullmatch(model) is not None


def from_hub(model: str, progress: Share | None = None) -> Path:
    """The directory of a model with this id. Raises ModelError."""
    report = progress or no_progress
    name, _, revision = model.partition("@")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ImportError:
        raise ModelError(
            f"{model} is not here, and without huggingface_hub nothing can be downloaded: "
            "pip install huggingface_hub, or give the path of a local directory"
        ) from None
    where: dict[str, Any] = {
        "repo_id": name,
        "revision": revision or None,
        "allow_patterns": _FILES,
    }
    try:
        found = _whole(Path(snapshot_download(**where, local_files_only=True)))
        if found is not None:
            return found
    except LocalEntryNotFoundError:
        pass
    except Exception as error:  # a boundary: somebody else's library
        raise ModelError(_cannot(model, error)) from error
    report(f"downloading {model}", 0.0)
    try:
        return Path(snapshot_download(**where))
    except Exception as error:  # a boundary: the network, and somebody else's library
        raise ModelError(_cannot(model, error)) from error


def _whole(directory: Path) -> Path | None:
    """A download that was broken off, or was of other files, is no model."""
    has_weights = next(directory.glob("*.safetensors"), None) is not None
    return directory if has_weights and (directory / "config.json").exists() else None


def _cannot(model: str, error: Exception) -> str:
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    return (
        f"{model} is not here, and cannot be downloaded from the hub ({reason}): check the id and "
        "the network (HF_ENDPOINT, HF_TOKEN), or give the path of a local directory"
    )
