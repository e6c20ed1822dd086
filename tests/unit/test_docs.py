"""The documents name things that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    "README.md",
    "CHANGELOG.md",
    "benchmarks/README.md",
    *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))),
]
SOURCES = {
    path.name
    for place in ("src/quire", "benchmarks", "examples", "scripts", "tests")
    for path in (ROOT / place).rglob("*.py")
}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_module_named_exists(document):
    text = (ROOT / document).read_text()
    named = {Path(name).name for name in re.findall(r"[\w/]+\.py\b", text)}
    assert named - SOURCES == set()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_link_leads_somewhere(document):
    path = ROOT / document
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        if target.startswith("https://"):
            continue  # elsewhere: not to be visited by a test
        assert (path.parent / target).exists(), target


def test_the_package_map_names_every_part():
    text = (ROOT / "docs/architecture.md").read_text()
    parts = {path.name for path in (ROOT / "src/quire").iterdir()} - {
        "__init__.py",
        "__pycache__",
        "py.typed",
    }
    missing = [part for part in parts if part not in text and f"{part}/" not in text]
    assert missing == []


def test_the_package_map_fits_on_a_screen():
    text = (ROOT / "docs/architecture.md").read_text()
    screen = text.split("## Package map")[1].split("```")[1]
    assert len(screen.splitlines()) <= 40
    source = ROOT / "src/quire"
    packages = {path.parent.name for path in source.rglob("__init__.py")} - {"quire"}
    assert {name for name in packages if not re.search(rf"\b{name}/", screen)} == set()


def test_the_metrics_table_is_what_the_server_offers():
    from quire.server.metrics import METRICS
    from quire.web.metrics import reference

    text = (ROOT / "docs/metrics.md").read_text()
    assert reference(METRICS) in text, "run scripts/reference"


def test_every_metric_named_exists():
    from quire.router.metrics import ROUTER_METRICS
    from quire.server.metrics import METRICS

    known = {spec.name for spec in (*METRICS, *ROUTER_METRICS)}
    in_vllm = (ROOT / "src/quire/integrations/vllm/metrics.py").read_text()
    known |= {f"{name}_total" for name in re.findall(r'"(quire_[a-z]+)"', in_vllm)}
    for document in DOCUMENTS:
        named = set(re.findall(r"quire_[a-z_]+(?![a-z_…])", (ROOT / document).read_text()))
        assert named - known == set(), document


def test_the_readme_fits_on_two_screens():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 105


def test_every_command_has_a_line(monkeypatch):
    import typer

    from quire.cli.app import app

    text = (ROOT / "docs/commands.md").read_text()
    named = set(re.findall(r"`(?:quire )?([a-z-]+)", text)) | set(
        re.findall(r"bench ([a-z]+)", text)
    )
    root = typer.main.get_command(app).commands
    wanted = {name for name, each in root.items() if not getattr(each, "commands", None)}
    wanted |= set(root["bench"].commands)
    assert wanted - named == set()
