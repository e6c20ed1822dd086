"""docs/tour.md: every link leads to the line on which the symbol that it names is defined."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("tour", ROOT / "scripts/tour.py")
tour = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tour)

LINKS = tour.LINK.findall(tour.TOUR.read_text())


def test_the_tour_visits_server_engine_cache_worker_and_store():
    packages = {path.split("/")[2] for _, path, _ in LINKS}
    assert {"server", "engine", "manager", "tree", "worker", "store", "transfer"} <= packages
    assert tour.TOUR.read_text().count("#L") == len(LINKS)


@pytest.mark.parametrize(("symbol", "path", "line"), LINKS)
def test_a_link_leads_to_what_it_names(symbol, path, line):
    found = tour.line_of(symbol, ROOT / path)
    assert found is not None, f"{path} has no {symbol}"
    assert found == int(line), "run scripts/reference"


def test_what_is_gone_is_noticed(tmp_path):
    file = tmp_path / "some.py"
    file.write_text("class A:\n    x = 1\n\n    def f(self): ...\n\nasync def g(): ...\n")
    assert (tour.line_of("A", file), tour.line_of("A.f", file), tour.line_of("g", file)) == (
        1,
        4,
        6,
    )
    assert tour.line_of("A.g", file) is None
    assert tour.line_of("x", file) is None
