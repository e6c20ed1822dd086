"""Accounts: what vLLM is told of a worker's operations, by request and by block.

Orders in, reports in; out come requests whose loads have ended, blocks that hold nothing of use,
and requests whose blocks nobody reads any more. Knows neither vLLM nor what moves bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from quire.integrations.vllm.orders import Orders, pack_reports, unpack_orders
from quire.messages import Backup, Command, Completion, Load, Transferred
from quire.types import OperationId, page_array


@dataclass(frozen=True, slots=True)
class _Load:
    request: str
    blocks: list[int]


class Accounts:
    def __init__(self) -> None:
        self._loads: dict[OperationId, _Load] = {}
        self._copying: set[OperationId] = set()
        """Blocks are read or written by these."""
        self._sending: dict[str, set[OperationId]] = {}
        self._reports: list[Completion] = []
        self._received: set[str] = set()
        self._bad_blocks: set[int] = set()

    @property
    def is_copying(self) -> bool:
        return bool(self._copying)

    @property
    def has_news(self) -> bool:
        return bool(self._reports)

    def begin(self, orders: Orders) -> list[Command]:
        """What the orders of a step say."""
        commands = unpack_orders(orders.commands)
        for command in commands:
            if isinstance(command, Load | Backup):
                self._copying.add(command.op)
            if isinstance(command, Load):
                blocks = page_array(command.device).tolist()
                self._loads[command.op] = _Load(orders.loads[command.op], blocks)
        for request, blocks in orders.refused.items():
            self._received.add(request)
            self._bad_blocks.update(blocks)
        for request, ops in orders.sending.items():
            self._sending[request] = set(ops)
        return commands

    def take(self, completions: Iterable[Completion]) -> None:
        for report in completions:
            self._reports.append(report)
            if not isinstance(report, Transferred) or report.op not in self._copying:
                continue
            load = self._loads.get(report.op)
            if load is not None:
                pairs = zip(load.blocks[report.first :], report.statuses, strict=False)
                self._bad_blocks.update(block for block, status in pairs if status)
            if report.final:
                self._copying.discard(report.op)
                if load is not None:
                    self._received.add(load.request)
                    del self._loads[report.op]

    def take_sent(self) -> set[str]:
        """Requests whose blocks are not needed any more."""
        sent = {name for name, ops in self._sending.items() if not ops & self._copying}
        for name in sent:
            del self._sending[name]
        return sent

    def take_received(self) -> set[str]:
        """Requests whose loads have ended, well or not."""
        received, self._received = self._received, set()
        return received

    def take_bad_blocks(self) -> set[int]:
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_reports(self) -> bytes:
        """For the leader; empty: nothing."""
        reports, self._reports = self._reports, []
        return pack_reports(reports) if reports else b""
