"""deploy/: files that are what Docker, Compose and Kubernetes take, with commands, options and
paths that exist. Nothing is built or started: there is no daemon where this runs."""

import re
import shlex
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from quire.models.embedded import _REQUIREMENT
from quire.settings import load
from quire.settings.options import OPTIONS, Settings
from unit.cli_support import taken_apart

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SERVERS = ("prefill", "decode")

# A schema: the keys that must be there; a trailing ? is for one that may be missing. [kind]: a
# list of such; dict, str, int, bool: any of that type.
PROBE = {
    "httpGet": {"path": str, "port": str},
    "periodSeconds": int,
    "failureThreshold?": int,
}
CONTAINER = {
    "name": str,
    "image": str,
    "args": [str],
    "envFrom": [{"secretRef": {"name": str}}],
    "ports": [{"name": str, "containerPort": int}],
    "startupProbe": PROBE,
    "livenessProbe": PROBE,
    "readinessProbe": PROBE,
}
POD = {"terminationGracePeriodSeconds": int, "containers": [CONTAINER]}
KINDS = {
    "Deployment": {
        "apiVersion": str,
        "kind": str,
        "metadata": {"name": str, "labels": dict},
        "spec": {
            "replicas": int,
            "strategy": {"rollingUpdate": {"maxUnavailable": int, "maxSurge": int}},
            "selector": {"matchLabels": dict},
            "template": {"metadata": {"labels": dict}, "spec": POD},
        },
    },
    "Service": {
        "apiVersion": str,
        "kind": str,
        "metadata": {"name": str, "labels": dict},
        "spec": {
            "selector": dict,
            "publishNotReadyAddresses": bool,
            "ports": [{"name": str, "port": int, "targetPort": str}],
        },
    },
}
SERVICE = {
    "image": str,
    "environment": dict,
    "stop_grace_period": str,
    "restart": str,
    "healthcheck": {"test": [str], "interval": str, "start_period": str},
    "command": [str],
    "ports?": [str],
}


def check(found: Any, schema: Any, where: str) -> None:
    if isinstance(schema, type):
        assert isinstance(found, schema), where
    elif isinstance(schema, list):
        assert isinstance(found, list), where
        for i, each in enumerate(found):
            check(each, schema[0], f"{where}[{i}]")
    else:
        assert isinstance(found, dict), where
        known = {name.removesuffix("?"): kind for name, kind in schema.items()}
        must = {name for name in schema if not name.endswith("?")}
        assert must <= found.keys() <= known.keys(), (where, found.keys() ^ known.keys())
        for name, each in found.items():
            check(each, known[name], f"{where}.{name}")


@pytest.fixture
def check_command(monkeypatch):
    """It is a command with such options, of the kind that its part should be."""

    def checked(words: list[str], part: str) -> None:
        options = taken_apart(monkeypatch, words)
        assert words[0] == ("route" if part == "router" else "serve")
        if part in SERVERS:
            assert options["role"] == part
            assert options["router"]

    return checked


def manifests() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))


def test_kubernetes_manifests_are_what_they_should_be(check_command) -> None:
    for manifest in manifests():
        check(manifest, KINDS[manifest["kind"]], manifest["metadata"]["name"])
    drain_s = Settings().drain_timeout
    deployments = {m["metadata"]["name"]: m for m in manifests() if m["kind"] == "Deployment"}
    assert deployments.keys() == {"quire-router", "quire-prefill", "quire-decode"}
    for name, deployment in deployments.items():
        template = deployment["spec"]["template"]
        labels = deployment["spec"]["selector"]["matchLabels"]
        assert labels == template["metadata"]["labels"]
        assert template["spec"]["terminationGracePeriodSeconds"] > drain_s
        assert deployment["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
        (container,) = template["spec"]["containers"]
        check_command(container["args"], name.removeprefix("quire-"))
        ports = {port["name"] for port in container["ports"]}
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert container[probe]["httpGet"]["port"] in ports
        assert container["readinessProbe"]["httpGet"]["path"] == "/ready"


def test_servers_find_the_router_by_its_name() -> None:
    (service,) = [m for m in manifests() if m["kind"] == "Service"]
    router = f"http://{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    for manifest in manifests():
        args = manifest["spec"].get("template", {"spec": {"containers": [{"args": []}]}})
        words = args["spec"]["containers"][0]["args"]
        if "--router" in words:
            assert words[words.index("--router") + 1] == router


def test_the_compose_file_is_what_it_should_be(check_command) -> None:
    found = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert found["services"].keys() == {"router", *SERVERS}
    drain_s = Settings().drain_timeout
    for name, service in found["services"].items():
        check(service, SERVICE, name)
        check_command(service["command"], name)
        assert int(service["stop_grace_period"].removesuffix("s")) > drain_s
        variables = {option.variable for option in OPTIONS.values()}
        assert service["environment"].keys() <= variables


@pytest.mark.parametrize("name", ["redis", "s3", "mooncake"])
def test_engines_that_share_a_store_are_started_with_what_there_is(name, check_command) -> None:
    path = DEPLOY / f"compose.{name}.yaml"
    services = yaml.safe_load(path.read_text())["services"]
    for engine in (services["one"], services["two"]):
        check_command(engine["command"], "one")
        ours = {k: v for k, v in engine["environment"].items() if k.startswith("QUIRE_")}
        assert load({}, ours).settings.store == ours["QUIRE_STORE"]
        assert set(engine["depends_on"]) <= services.keys()
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert len(set(ports)) == len(ports)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["serve", "--portal", "1"], "--portal"),
        (["sevre"], "sevre"),
        (["route", "--port", "none"], "integer"),
    ],
)
def test_a_command_that_does_not_exist_is_noticed(words, said, check_command) -> None:
    with pytest.raises(Exception, match=said):
        check_command(words, "one")


# ---- images --------------------------------------------------------------------------------------

IMAGES = ["Dockerfile", "Dockerfile.cuda"]
WORDS = {"FROM", "ARG", "RUN", "WORKDIR", "COPY", "USER", "EXPOSE", "ENTRYPOINT"}


def instructions(name: str) -> list[tuple[str, str]]:
    text = re.sub(r"\\\n", " ", (DEPLOY / name).read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]


def is_sent(path: str) -> bool:
    """Whether Docker gets to see a file: the last rule that fits it counts."""
    sent = True
    for rule in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = rule.lstrip("!")
        if rule and not rule.startswith("#") and fnmatch(path.split("/", maxsplit=1)[0], pattern):
            sent = rule.startswith("!")
    return sent


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_is_made_of_what_there_is(name) -> None:
    found = instructions(name)
    assert {word for word, _ in found} <= WORDS
    assert found[0] == ("FROM", "python:3.11-slim")  # what the tests run on
    args = dict(rest.split("=", 1) for word, rest in found if word == "ARG")
    assert set(args["EXTRAS"].split(",")) <= PROJECT["optional-dependencies"].keys()
    copied = set()
    for word, rest in found:
        if word == "COPY":
            *sources, _ = rest.split()
            copied |= set(sources)
            for source in sources:
                assert (ROOT / source).exists(), source
                assert is_sent(source), source
        elif word == "RUN":
            subprocess.run(["bash", "-n", "-c", rest], check=True)
            for pins in re.findall(r"-c (\S+)", rest):
                assert pins in copied | {'"import'}, pins
    # setuptools builds from what pyproject.toml names
    assert {"pyproject.toml", "src", PROJECT["readme"], *PROJECT["license-files"]} <= copied
    (entry,) = [rest for word, rest in found if word == "ENTRYPOINT"]
    assert entry == '["quire"]'
    assert "quire" in PROJECT["scripts"]
    words = [word for word, _ in found]
    assert words.index("USER") > max(i for i, word in enumerate(words) if word == "RUN")


def test_the_image_brings_the_model_that_is_served_unless_told() -> None:
    assert any(_REQUIREMENT in rest for _, rest in instructions("Dockerfile"))


def test_images_are_built_from_sources_and_nothing_else() -> None:
    for path in (".git", ".venv", "build", "tests", "docs"):
        assert not is_sent(path)


def test_what_is_said_about_building_and_running_images_can_be_typed(monkeypatch) -> None:
    texts = [path.read_text() for path in DEPLOY.iterdir() if path.is_file()]
    lines = [line.lstrip("# ") for text in texts for line in text.splitlines()]
    builds = [shlex.split(line) for line in lines if line.startswith("docker build")]
    assert len(builds) >= 4
    for words in builds:
        assert (ROOT / words[words.index("-f") + 1]).exists()
        for word in words:
            if word.startswith("EXTRAS="):
                extras = word.removeprefix("EXTRAS=").split(",")
                assert set(extras) <= PROJECT["optional-dependencies"].keys()
    for words in (shlex.split(line) for line in lines if line.startswith("docker run")):
        taken_apart(monkeypatch, words[words.index("quire") + 1 :])
