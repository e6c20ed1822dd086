"""Connectors with a fault built in, loaded by vLLM by path. Knows vLLM."""

import os
from pathlib import Path
from typing import Any

import torch

from quire.integrations.vllm.connector import QuireConnector
from quire.integrations.vllm.orders import unpack_orders
from quire.messages import Load
from quire.transfer.base import Copy
from quire.types import page_array


class FailingConnector(QuireConnector):
    """Every load fails, with its blocks half written."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)

        def load(host: Any, device: Any) -> Any:
            for tensor in kv_caches.values():
                tensor[page_array(device).tolist()] = 7.0
            raise OSError("this link is cut")

        for pools in self.hands.pools.values():
            object.__setattr__(pools.engine, "load", load)


class StallingConnector(QuireConnector):
    """Loads begin and never end; the first one says so in a file."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)

        def load(host: Any, device: Any) -> Copy:
            Path(os.environ["QUIRE_TEST_MARK"]).touch()
            return Copy(len(kv_caches))

        for pools in self.hands.pools.values():
            object.__setattr__(pools.engine, "load", load)


class DamagingConnector(QuireConnector):
    """What is loaded was overwritten on the host: behind every check there is. Of one component, if
    a variable says which."""

    def wait_for_save(self) -> None:
        for command in unpack_orders(self._step.commands):
            name = os.environ.get("QUIRE_TEST_COMPONENT")
            if isinstance(command, Load) and name in (None, command.component):
                rows = page_array(command.host).tolist()
                self.hands.pools[command.component].host.pages()[rows] = 0.5
        super().wait_for_save()
