"""Accounts: what vLLM is told of a worker's operations, by request.

Orders in, reports in; out come requests whose loads have ended, those among them that hold nothing
of use, and requests whose blocks nobody reads any more. Knows neither vLLM nor what moves bytes.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.integrations.vllm.orders import Orders, pack_reports, unpack_orders
from quire.messages import Backup, Command, Completion, Load, Transferred
from quire.types import OperationId


class Accounts:
    def __init__(self) -> None:
        self._loads: dict[OperationId, str] = {}
        """The request whose blocks are filled."""
        self._copying: dict[OperationId, set[str]] = {}
        """Blocks are read or written by these: the components that have not ended."""
        self._sending: dict[str, list[OperationId]] = {}
        self._reports: list[Completion] = []
        self._received: set[str] = set()
        self._failed: set[str] = set()

    @property
    def has_news(self) -> bool:
        return bool(self._reports)

    def is_copying(self, ops: Iterable[OperationId] | None = None) -> bool:
        """Any of these; None: anything."""
        return bool(self._copying if ops is None else self._copying.keys() & set(ops))

    def begin(self, orders: Orders) -> list[Command]:
        """What the orders of a step say."""
        commands = unpack_orders(orders.commands)
        for command in commands:
            if isinstance(command, Load | Backup):
                self._copying.setdefault(command.op, set()).add(command.component)
            if isinstance(command, Load):
                self._loads[command.op] = orders.loads[command.op]
        self._received.update(orders.refused)
        self._failed.update(orders.refused)
        self._sending.update(orders.sending)
        return commands

    def take(self, completions: Iterable[Completion]) -> None:
        for report in completions:
            self._reports.append(report)
            if not isinstance(report, Transferred) or report.op not in self._copying:
                continue
            if report.op in self._loads and any(report.statuses):
                self._failed.add(self._loads[report.op])
            if report.final:
                left = self._copying[report.op]
                left.discard(report.component)
                if not left:
                    del self._copying[report.op]
                    if report.op in self._loads:
                        self._received.add(self._loads.pop(report.op))

    def take_sent(self) -> set[str]:
        """Requests whose blocks are not needed any more."""
        sent = {name for name, ops in self._sending.items() if not self.is_copying(ops)}
        for name in sent:
            del self._sending[name]
        return sent

    def take_received(self) -> tuple[set[str], set[str]]:
        """Requests whose loads have ended, and those of them for which they were in vain."""
        received, self._received = self._received, set()
        failed = self._failed & received
        self._failed -= failed
        return received, failed

    def take_reports(self) -> bytes:
        """For the leader; empty: nothing."""
        reports, self._reports = self._reports, []
        return pack_reports(reports) if reports else b""
