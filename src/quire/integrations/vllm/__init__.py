"""Quire inside vLLM: `"kv_connector": "QuireConnector"`, from this module. See docs/vllm.md.

vLLM is imported when the connector is asked for, so that all else here can be had without it.
"""

from typing import Any

__all__ = ["QuireConnector"]


def __getattr__(name: str) -> Any:
    if name == "QuireConnector":
        from quire.integrations.vllm.connector import QuireConnector

        return QuireConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
