"""Parts: what goes through the host to device pages of one request, for streams and meetings.

    asked for ──has come──▶ on the host ──load──▶ on the device; its host pages are free

Knows intakes that nobody shares, and their copies to the device; not which part is asked for next,
nor what becomes of one that fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.keys import PrefixKey
from quire.manager.core import Core
from quire.manager.fetches.base import Intake, PageRange
from quire.manager.fetches.intakes import Intakes
from quire.manager.operations import COPY_TIMEOUT_S, Operation, OperationKind
from quire.messages import Load
from quire.types import OperationId, PageIds, page_ids


class Parts:
    def __init__(self, core: Core, intakes: Intakes) -> None:
        self._core = core
        self._intakes = intakes

    def new(self, key: PrefixKey, first: int, last: int, epoch: int, end: int) -> Intake:
        """Pages [first, last), of a prefix of which `end` are wanted at most."""
        known = [bytearray(end) for _ in self._core.components]
        timeout_s = self._core.config.prefetch.max_timeout_s
        return Intake(key, first, last, timeout_s, known, epoch, is_part=True)

    def take(self, part: Intake) -> None:
        """It has come to the host, in full or not, or is overdue: no more is waited for."""
        self._intakes.take_out(part)
        self._intakes.stop(part)

    def load(
        self,
        part: Intake,
        targets: Sequence[tuple[PageRange, PageIds]],
        on_report: Callable[[Operation], None],
    ) -> OperationId:
        """Copy pages of it, all of which are here, to these device pages."""
        core = self._core
        names = [component.name for component in core.components]
        op = core.operations.start(
            OperationKind.LOAD,
            {names[component]: last - first for (component, first, last), _ in targets},
            timeout_s=COPY_TIMEOUT_S,
            on_report=on_report,
        )
        for (component, first, last), device in targets:
            here = part.here[component]
            host = page_ids([here[page] for page in range(first, last)])
            core.outbox.append(Load(op.id, names[component], host, device))
        return op.id

    def loaded(self, part: Intake, op: Operation) -> None:
        """Its copy has ended, well or not."""
        self._intakes.close(part)
        self._core.finish(op)
