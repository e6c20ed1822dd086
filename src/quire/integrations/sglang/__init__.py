"""Quire's stores behind SGLang's HiCache: `QuireStorage`, loaded by path. See docs/vllm.md.

SGLang is imported when the class is asked for, so that all else here can be had without it.
"""

from typing import Any

__all__ = ["QuireStorage"]


def __getattr__(name: str) -> Any:
    if name == "QuireStorage":
        from quire.integrations.sglang.storage import QuireStorage

        return QuireStorage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
