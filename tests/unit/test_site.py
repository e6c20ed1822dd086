"""The documents as a site: it can be built, every link in it leads somewhere, and a reader without
a network sees all of it."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytest.importorskip("material", reason="mkdocs-material is not installed: quire[docs]")
ROOT = Path(__file__).parents[2]


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Not quietly: what is not said is not counted either."""
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "-f", str(config), "-d", str(site)],
        capture_output=True,
        text=True,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        cwd=ROOT,
        check=False,
    )


class Page(HTMLParser):
    """What a page needs, where it leads, and what can be pointed at in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.needs: list[str] = []
        self.links: list[str] = []
        self.names: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.names |= {found[name] for name in ("id", "name") if found.get(name)}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif tag == "link" and found.get("rel") in ("stylesheet", "icon", "preload"):
            self.needs.append(found["href"])
        elif "src" in found:
            self.needs.append(found["src"])


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT / "mkdocs.yml", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, Page]:
    return {path: Page(path.read_text()) for path in site.rglob("*.html")}


def test_every_document_is_a_page(site):
    for document in (ROOT / "docs").glob("*.md"):
        assert (site / f"{document.stem}.html").exists(), document
    assert "Quire" in (site / "index.html").read_text()


def test_every_link_leads_to_a_page_and_a_place_in_it(pages):
    count = 0
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or path.name == "404.html":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            assert target.exists(), f"{path.name}: {link}"
            if parts.fragment and target in pages and not parts.fragment.startswith("__"):
                assert unquote(parts.fragment) in pages[target].names, f"{path.name}: {link}"
                count += 1
    assert count > 100


def test_nothing_is_fetched_from_elsewhere(site, pages):
    for path, page in pages.items():
        elsewhere = [each for each in page.needs if urlsplit(each).netloc]
        assert not elsewhere, path
    for sheet in site.rglob("*.css"):
        found = re.findall(r"(?:url\(|@import )['\"]?(https?:[^'\")]+)", sheet.read_text())
        assert not found, sheet


def test_a_link_that_leads_nowhere_ends_the_build(tmp_path):
    """The control: what the first test rests on."""
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "index.md").write_text("# One\n\n[no page](two.md), [no place](#three)\n")
    config = (ROOT / "mkdocs.yml").read_text().partition("nav:\n  - Quire")[0]
    config = config.replace("docs_dir: docs", f"docs_dir: {docs}")
    config = re.sub(r"^(hooks|not_in_nav):.*\n", "", config, flags=re.MULTILINE)
    (tmp_path / "mkdocs.yml").write_text(config)
    done = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode != 0
    assert "two.md" in done.stdout + done.stderr
    assert "#three" in done.stdout + done.stderr
