"""What a person sees of a benchmark's result."""

from collections.abc import Iterable

from rich.console import Console, RenderableType


def shown(items: Iterable[RenderableType]) -> str:
    console = Console(width=140)
    with console.capture() as captured:
        for item in items:
            console.print(item)
    return captured.get()
