"""What a model keeps, as layouts of pages: one for each component that it has.

    full         keys and values of every token
    window       those of the last tokens, for layers that see no more
    recurrent    states: a page is one sequence's states of all layers, called a slot

Layer i of a component's pool is the i-th of the model's layers of that kind.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.memory.page_layout import PageLayout
from quire.models import ModelShape

FULL, WINDOW, RECURRENT = "full", "window", "recurrent"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a layer of the model has its keys and values."""

    component: str
    layer: int
    """Of the component's pool."""


def layouts(
    shape: ModelShape, *, dtype: str, page_size: int, kv_heads: int, has_draft: bool = False
) -> list[PageLayout]:
    """`full` comes first. `kv_heads`: of one rank. `has_draft`: a draft head keeps its keys and
    values beside the model's, as one more layer of `full`."""
    num_full = len(shape.full_layers) + has_draft
    found = [PageLayout(FULL, num_full, kv_heads, shape.head_dim, dtype, page_size)]
    if shape.window_layers:
        num_layers = len(shape.window_layers)
        found.append(PageLayout(WINDOW, num_layers, kv_heads, shape.head_dim, dtype, page_size))
    if shape.recurrent_layers:
        found.append(
            PageLayout(
                RECURRENT,
                num_layers=len(shape.recurrent_layers),
                num_kv_heads=1,
                head_dim=shape.state_bytes(dtype),
                dtype="uint8",
                page_size=1,
                num_planes=1,
            )
        )
    return found


def attention_places(shape: ModelShape, *, has_draft: bool = False) -> dict[int, Place]:
    """By layer of the model, for those with attention; a draft head's comes after all of them."""
    draft = (shape.num_layers,) if has_draft else ()
    kinds = {FULL: shape.full_layers + draft, WINDOW: shape.window_layers}
    return {
        layer: Place(component, index)
        for component, layers in kinds.items()
        for index, layer in enumerate(layers)
    }
