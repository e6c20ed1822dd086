"""How the memory of a tier is divided among the components of a model.

A model with windows or recurrent layers needs pages of several kinds in proportion to how it is
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quire.components import Component, FullAttention, PoolSize, Recurrent, SlidingWindow
from quire.engine.config import EngineConfig
from quire.engine.layouts import FULL, RECURRENT, WINDOW
from quire.errors import MemoryBudgetError
from quire.memory.page_layout import PageLayout
from quire.memory.sizing import check_host_budget
from quire.models import ModelShape
from quire.sizes import format_bytes

_MIN_FULL_PAGES = 4
_STATES_PER_SEQUENCE = 3
"""The one worked on, the one saved last, and a snapshot that stays."""
_MIN_SLOTS = 4
_MIN_SHARE = 8
"""Windows and states have at least one part in so many of the memory: they may be small beside a
typical sequence, but without them its pages are of no use."""


def plan_pools(
    config: EngineConfig,
    shape: ModelShape,
    ranks: Sequence[Sequence[PageLayout]],
    typical_tokens: int,
) -> dict[str, PoolSize]:
    """Pages per component: the same on every rank, so they fit the budgets together.

    Raises MemoryBudgetError.
    """
    typical = min(typical_tokens, shape.max_position_embeddings)
    names = [layout.component for layout in ranks[0]]
    device_bytes = {name: _bytes(ranks, i, stride=False) for i, name in enumerate(names)}
    host_bytes = {name: _bytes(ranks, i, stride=True) for i, name in enumerate(names)}
    device = _divide(
        config, shape, typical, config.device_bytes, device_bytes, option="device_memory"
    )
    host = dict.fromkeys(names, 0)
    if config.host_bytes:
        host = _divide(config, shape, typical, config.host_bytes, host_bytes, option="host_memory")
    on_cpu = config.device == "cpu"
    total = sum(host[name] * host_bytes[name] for name in names)
    if on_cpu:
        total += sum(device[name] * device_bytes[name] for name in names)
    check_host_budget(
        total,
        what="the cache",
        option="device_memory and host_memory together" if on_cpu else "host_memory",
    )
    return {name: PoolSize(device[name], host[name]) for name in names}


def components(
    config: EngineConfig, shape: ModelShape, sizes: Mapping[str, PoolSize]
) -> list[Component]:
    """What the manager is to keep in step."""
    found: list[Component] = [FullAttention()]
    if WINDOW in sizes:
        window = SlidingWindow(len(found), shape.window, config.page_size, sizes[WINDOW])
        found.append(window)
    if RECURRENT in sizes:
        found.append(Recurrent(len(found), sizes[RECURRENT]))
    return found


def chunk_limit(config: EngineConfig, shape: ModelShape, sizes: Mapping[str, PoolSize]) -> int:
    """Tokens a step may compute: beside its window, a chunk must fit into the window pool."""
    if WINDOW not in sizes:
        return config.chunk_tokens
    spare = sizes[WINDOW].device - window_pages(config, shape) - 1
    return min(config.chunk_tokens, spare * config.page_size)


def running_limit(config: EngineConfig, sizes: Mapping[str, PoolSize]) -> int:
    """Requests computed together: each works on a state of its own and saves one."""
    if RECURRENT not in sizes:
        return config.max_running
    return max(1, min(config.max_running, sizes[RECURRENT].device // 2))


def window_pages(config: EngineConfig, shape: ModelShape) -> int:
    return -(-(shape.window - 1) // config.page_size)


def _divide(
    config: EngineConfig,
    shape: ModelShape,
    typical: int,
    budget: int,
    page_bytes: dict[str, int],
    *,
    option: str,
) -> dict[str, int]:
    """Pages of each component: as many typical sequences as fit, each whole."""
    per_sequence = {
        FULL: max(1, typical // config.page_size),
        WINDOW: window_pages(config, shape) + 1 if WINDOW in page_bytes else 0,
        RECURRENT: _STATES_PER_SEQUENCE,
    }
    least = {FULL: _MIN_FULL_PAGES, WINDOW: 0, RECURRENT: 0}
    if WINDOW in page_bytes:  # one window and the smallest chunk
        least[WINDOW] = per_sequence[WINDOW] + 2
    if RECURRENT in page_bytes:
        least[RECURRENT] = _MIN_SLOTS
    needed = sum(least[name] * size for name, size in page_bytes.items())
    if needed > budget:
        held = budget // page_bytes[FULL]
        what = f"holds {held} pages of {format_bytes(page_bytes[FULL])}"
        if len(page_bytes) > 1:
            what = "does not hold one sequence with its window and states"
        raise MemoryBudgetError(
            f"{option} of {format_bytes(budget)} {what}: give at least {format_bytes(needed)}, "
            f"better many times that{', or 0 for none' if option == 'host_memory' else ''}"
        )
    if len(page_bytes) == 1:
        return {FULL: budget // page_bytes[FULL]}
    sequence = sum(per_sequence[name] * size for name, size in page_bytes.items())
    pages: dict[str, int] = {}
    left = budget
    for name in (RECURRENT, WINDOW):
        if name in page_bytes:
            share = int(per_sequence[name] * budget / sequence)
            pages[name] = max(least[name], share, budget // _MIN_SHARE // page_bytes[name])
            left -= pages[name] * page_bytes[name]
    pages[FULL] = left // page_bytes[FULL]
    if pages[FULL] < least[FULL]:  # little memory: only what cannot be done without
        pages = least | {FULL: (budget - needed) // page_bytes[FULL] + least[FULL]}
    return {name: pages[name] for name in page_bytes}


def _bytes(ranks: Sequence[Sequence[PageLayout]], index: int, *, stride: bool) -> int:
    """One page of a component, all ranks together."""
    layouts = [layouts[index] for layouts in ranks]
    return sum(layout.page_stride_bytes if stride else layout.page_bytes for layout in layouts)
