"""One name, one thing: no two modules of the package share a name, and no two public types:
classes, and names that stand for a type.

Fails with the names that do. A module may be called as its package (`tree/tree.py`: what the
package is about), and in `cli/` and right below `bench/` as the command it is (`quire store`,
`quire bench store`). Private classes belong to their modules.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src/quire"

# Names that say which room of a package a module is: the package says of what.
ROOMS = {
    "__init__": "Python's",
    "__main__": "Python's",
    "app": "a typer or FastAPI application",
    "base": "the interface that the files beside it implement",
    "client": "the end of a line that asks",
    "config": "what a part is built with",
    "counters": "what a part counts",
    "errors": "what a part raises, or answers with",
    "kinds": "the choices that a part offers, without loading it",
    "messages": "what travels on a line",
    "metrics": "what a part tells Prometheus",
    "options": "what a person may set",
    "plots": "pictures of a result",
    "process": "a part as a process of its own",
    "report": "a result as tables",
    "run": "the one entry of a package that does one long thing",
    "server": "the end of a line that answers",
    "store": "a kind of store, each in a package of its own; and the simulated one",
    "torch": "an implementation by that library",
    "triton": "an implementation by that library",
    "wire": "messages as bytes",
}

# What many parts mean by the same word, in the same sense.
TYPES = {
    "Result": "what is measured or replayed, a plain dict, as `--json` prints it",
    "Json": "an object of JSON",
}

_CAMEL_CASE = re.compile(r"[A-Z][a-zA-Z0-9]*[a-z][a-zA-Z0-9]*")


def modules() -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE)
        is_command = place.parts[0] == "cli" or place.parts[:-1] == ("bench",)
        if not is_command and path.stem != path.parent.name and path.stem not in ROOMS:
            found[path.stem].append(str(place))
    return found


def types() -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        place = str(path.relative_to(PACKAGE))
        for name in types_of(path.read_text()):
            if name not in TYPES:
                found[name].append(place)
    return found


def types_of(source: str) -> list[str]:
    """Public ones. A TypeVar stands for any type, and means nothing outside what it is used in."""
    names = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign) and not ast.unparse(node.value).startswith("TypeVar("):
            names += [each.id for each in node.targets if isinstance(each, ast.Name)]
    return [name for name in names if _CAMEL_CASE.fullmatch(name)]


def complaints(kind: str, found: dict[str, list[str]]) -> list[str]:
    return [
        f"{kind} {name} stands for several things: {', '.join(places)}: rename all but one"
        for name, places in sorted(found.items())
        if len(places) > 1
    ]


def main() -> int:
    said = complaints("the module", modules()) + complaints("the type", types())
    print("\n".join(said) or "every name stands for one thing")
    return bool(said)


if __name__ == "__main__":
    sys.exit(main())
