"""deploy/compose.STORE.yaml: what Compose takes, with stores, extras and options that exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from quire.settings.options import OPTIONS
from quire.store.url import parse_url

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[3]
STORES = ("redis", "s3", "mooncake")
KEYS = {
    "image",
    "command",
    "entrypoint",
    "environment",
    "depends_on",
    "ports",
    "restart",
}


def services(store: str) -> dict[str, dict[str, Any]]:
    return yaml.safe_load(text_of(store))["services"]


def text_of(store: str) -> str:
    return (ROOT / "deploy" / f"compose.{store}.yaml").read_text()


@pytest.mark.parametrize("store", STORES)
def test_two_engines_share_one_store(store):
    found = services(store)
    for service in found.values():
        assert service.keys() <= KEYS
        assert isinstance(service["image"], str)
        assert all(isinstance(word, str) for word in service["command"])
        assert set(service.get("depends_on", [])) <= found.keys()
    engines = [found["one"], found["two"]]
    assert engines[0]["environment"] == engines[1]["environment"]
    assert engines[0]["ports"] != engines[1]["ports"]
    variables = {option.variable for option in OPTIONS.values()}
    flags = {f"--{name.replace('_', '-')}" for name, o in OPTIONS.items() if o.has_flag}
    for engine in engines:
        own = {name for name in engine["environment"] if not name.startswith("AWS_")}
        assert own <= variables
        assert engine["command"][0] == "serve"
        assert set(engine["command"][1::2]) <= flags


@pytest.mark.parametrize("store", STORES)
def test_the_url_is_one_that_is_understood_and_names_a_service(store, read_as_stores_do):
    text = services(store)["one"]["environment"]["QUIRE_STORE"]
    read_as_stores_do(text)
    url = parse_url(text)
    assert url.scheme == store
    where = url.options.get("endpoint", f"//{url.host}")
    assert re.search(r"//([a-z]+):\d+", where)[1] in services(store)


@pytest.mark.parametrize("store", STORES)
def test_the_image_has_the_extras_that_it_needs(store):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].keys()
    named = re.findall(r"EXTRAS=([a-z0-9,]+)", text_of(store))
    for each in named:
        assert set(each.split(",")) <= extras
    if store in extras:
        assert store in named[0].split(",")
    if "codec=" in text_of(store):
        assert "codecs" in named[0].split(",")


@pytest.mark.parametrize("store", STORES)
def test_the_commands_to_type_name_files_that_there_are(store):
    """The image first: each says how it is built, and with which extras."""
    said = [line for line in text_of(store).splitlines() if line.startswith("#")]
    build, up = (line.removeprefix("#").split() for line in said if "docker" in line)
    assert build[:2] == ["docker", "build"]
    assert build[-3:] == ["-t", services(store)["one"]["image"], "."]
    assert up == ["docker", "compose", "-f", f"deploy/compose.{store}.yaml", "up"]
    assert (ROOT / build[build.index("-f") + 1]).is_file()
    assert " ".join(up) in (ROOT / "docs" / "stores.md").read_text()
