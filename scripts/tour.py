"""Set the lines of docs/tour.md anew: each link names a symbol, and leads to its definition."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOUR = ROOT / "docs/tour.md"
LINK = re.compile(r"\[`([\w.]+)`\]\(\.\./([\w/]+\.py)#L(\d+)\)")


def line_of(symbol: str, path: Path) -> int | None:
    """Of a class, a function or a method (`Class.method`); None: there is none of that name."""
    body: list[ast.stmt] = ast.parse(path.read_text()).body
    found: ast.stmt | None = None
    for name in symbol.split("."):
        found = next((each for each in body if getattr(each, "name", None) == name), None)
        if not isinstance(found, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            return None
        body = found.body
    return found.lineno if found is not None else None


def main() -> int:
    missing: list[str] = []

    def renewed(found: re.Match[str]) -> str:
        symbol, path, old = found.groups()
        line = line_of(symbol, ROOT / path)
        if line is None:
            missing.append(f"{path} has no {symbol}")
        return f"[`{symbol}`](../{path}#L{line or old})"

    TOUR.write_text(LINK.sub(renewed, TOUR.read_text()))
    print("\n".join(missing), file=sys.stderr, end="\n" if missing else "")
    return bool(missing)


if __name__ == "__main__":
    sys.exit(main())
