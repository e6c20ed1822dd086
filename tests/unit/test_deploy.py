"""deploy/: files that are what Compose and Kubernetes take, with options and paths that exist."""

import inspect
from pathlib import Path
from typing import Any

import pytest

from quire.cli.route import route
from quire.settings.options import OPTIONS, Settings

yaml = pytest.importorskip("yaml")

DEPLOY = Path(__file__).parents[2] / "deploy"
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


def check_command(words: list[str], part: str) -> None:
    """Every option is one of that command."""
    command, flags = words[0], words[1::2]
    assert command == ("serve" if part in SERVERS else "route")
    if part in SERVERS:
        known = {f"--{name.replace('_', '-')}" for name, o in OPTIONS.items() if o.has_flag}
        assert words[words.index("--role") + 1] == part
        assert "--router" in flags
    else:
        known = {f"--{name.replace('_', '-')}" for name in inspect.signature(route).parameters}
    assert set(flags) <= known, flags


def manifests() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))


def test_kubernetes_manifests_are_what_they_should_be() -> None:
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


def test_the_compose_file_is_what_it_should_be() -> None:
    found = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert found["services"].keys() == {"router", *SERVERS}
    drain_s = Settings().drain_timeout
    for name, service in found["services"].items():
        check(service, SERVICE, name)
        check_command(service["command"], name)
        assert int(service["stop_grace_period"].removesuffix("s")) > drain_s
        variables = {option.variable for option in OPTIONS.values()}
        assert service["environment"].keys() <= variables
