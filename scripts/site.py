"""What mkdocs does beside docs/: README is the first page, and files that documents point at are
pages too, with lines to point at.

    in the repository                    on the site
    README.md                            index.md
    docs/serving.md                      serving.md
    CHANGELOG.md, benchmarks/README.md   the same
    src/quire/keys.py#L10                code/src/quire/keys.py.md#L-10

Knows paths and links; a link that leads nowhere is for mkdocs to complain about, which it does.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_for_filename
from pygments.util import ClassNotFound

ROOT = Path(__file__).parents[1]
FIRST = "README.md"
OTHERS = ("CHANGELOG.md", "benchmarks/README.md")
_LINK = re.compile(r"(\]\()([^)#\s]*)(#[^)\s]*)?(\))")
_LINE = re.compile(r"#L(\d+)")


def on_files(files: Files, config: Any) -> Files:
    for path in (FIRST, *OTHERS):
        files.append(File.generated(config, place_of(path), content=(ROOT / path).read_text()))
    for page in list(files.documentation_pages()):
        for path in sorted(named_by(page)):
            if files.get_file_from_path(place_of(path)) is None:
                files.append(File.generated(config, place_of(path), content=shown(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Its links, as they are on the site."""
    own = page.file.src_uri
    if own.startswith("code/"):
        return markdown
    source = repository_path(own)

    def moved(found: re.Match[str]) -> str:
        opening, target, anchor, closing = found.group(1), found.group(2), found.group(3), ")"
        if not target or "://" in target or target.startswith("mailto:"):
            return found.group(0)
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if not (ROOT / path).is_file():
            return found.group(0)
        there = posixpath.relpath(place_of(path), posixpath.dirname(own) or ".")
        return opening + there + _LINE.sub(r"#L-\1", anchor or "") + closing

    return _LINK.sub(moved, markdown)


def place_of(path: str) -> str:
    """Of a file of the repository, on the site."""
    if path == FIRST:
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return path if path in OTHERS else f"code/{path}.md"


def repository_path(place: str) -> str:
    """The way back, for pages that were written by a person."""
    if place == "index.md":
        return FIRST
    return place if place in OTHERS else f"docs/{place}"


def named_by(page: File) -> set[str]:
    """Files of the repository that a page points at and that no person wrote a page of."""
    source = repository_path(page.src_uri)
    found = set()
    for _, target, _, _ in _LINK.findall(page.content_string):
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if target and place_of(path).startswith("code/") and (ROOT / path).is_file():
            found.add(path)
    return found


def shown(path: str) -> str:
    """A page of a file, each of whose lines has a name."""
    text = (ROOT / path).read_text()
    try:
        lexer = get_lexer_for_filename(path, stripnl=False)
    except ClassNotFound:
        lexer = get_lexer_for_filename("text.txt", stripnl=False)
    formatter = HtmlFormatter(cssclass="highlight", lineanchors="L", linenos="inline")
    return (
        f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n{highlight(text, lexer, formatter)}\n"
    )
