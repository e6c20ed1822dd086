"""Models on disk: found, converted once, described, fingerprinted and loaded.

Importing this imports neither torch nor transformers; the functions that need them do.
"""

from quire.models.cache import cache_dir
from quire.models.embedded import EMBEDDED_NAME, embedded_model
from quire.models.fingerprint import fingerprint
from quire.models.load import (
    ModelShape,
    conversion,
    describe,
    load_model,
    load_tokenizer,
    read_config,
    resolve,
)
from quire.models.recurrence import StateLayout, StatePart, StateShape
from quire.models.support import check_supported

__all__ = [
    "EMBEDDED_NAME",
    "ModelShape",
    "StateLayout",
    "StatePart",
    "StateShape",
    "cache_dir",
    "check_supported",
    "conversion",
    "describe",
    "embedded_model",
    "fingerprint",
    "load_model",
    "load_tokenizer",
    "read_config",
    "resolve",
]
