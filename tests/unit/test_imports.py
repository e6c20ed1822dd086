"""The import directions of the package: downwards only, and no torch where the leader lives.

Each part of the package may import only the parts listed for it. Imports inside functions and
under TYPE_CHECKING are held to the same list, except for the pairs in TYPING_ONLY.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import quire

PACKAGE = Path(quire.__file__).parent

BOTTOM = {"types", "errors", "sizes", "messages", "progress", "decoders"}
LEADER = BOTTOM | {"config", "keys", "eviction", "tree", "components", "memory.allocator"}
HANDS = BOTTOM | {"child", "garbage", "memory", "transfer", "store"}
LIBRARY = LEADER | HANDS | {"logs", "manager", "peer", "worker"}

# part → parts it may import. A part is a module, or a package as a whole.
MAY_IMPORT: dict[str, set[str]] = {
    "types": set(),
    "errors": set(),
    "sizes": {"errors"},
    "progress": set(),
    "messages": {"types", "keys"},
    "child": {"errors", "decoders"},
    "decoders": set(),
    "garbage": set(),
    "own_server": {"child", "decoders", "engine.messages", "errors", "logs"},
    "logs": set(),
    "tracing": {"errors"},
    "keys": {"types", "errors"},
    "eviction": set(),
    "config": {"errors", "eviction"},
    "tree": {"types", "errors", "keys", "eviction"},
    "components": {"types", "errors", "tree", "eviction"},
    "manager": LEADER,
    "memory": BOTTOM,
    "transfer": BOTTOM | {"memory"},
    "store": BOTTOM,
    "testing": BOTTOM | {"store"},
    "peer": BOTTOM | {"memory"},
    "worker": HANDS | {"peer"},
    "disagg": LEADER | {"manager", "peer"},
    "": LIBRARY,
    "models": BOTTOM | {"child"},
    "engine": LIBRARY | {"models", "disagg"},
    "web": BOTTOM | {"", "models.cache", "peer.address", "tracing"},
    "text": BOTTOM | {"models", "engine.messages"},
    "server": BOTTOM | {"", "engine", "peer.address", "store.url", "text", "web"},
    "settings": LIBRARY | {"models", "engine", "web"},
    "router": {"", "decoders", "errors", "engine", "peer.address", "web"},
    "sim": LIBRARY | {"sim", "engine", "disagg", "router"},
    "replay": LIBRARY | {"engine"},
    "bench": LIBRARY | {"models", "engine", "own_server", "settings"},
    "demo": LIBRARY,
    "integrations": LIBRARY | {"models"},
    "__main__": {"cli"},
    "cli": LIBRARY
    | {
        "",
        "sim",
        "replay",
        "bench",
        "demo",
        "models",
        "engine",
        "own_server",
        "server",
        "settings",
        "web",
        "router",
    },
}

# Only for annotations: a policy orders the tree's holdings without importing the tree.
TYPING_ONLY = {("eviction", "tree")}


def part_of(module: str) -> str:
    """quire.manager.core → manager; quire itself → ""."""
    return module.removeprefix("quire").lstrip(".").partition(".")[0]


def module_of(path: Path) -> str:
    parts = ["quire", *path.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = [(module_of(path), path) for path in sorted(PACKAGE.rglob("*.py"))]


def imported(path: Path) -> Iterator[tuple[str, bool]]:
    """(module, whether only for type checking) for every import of ours in a file."""
    tree = ast.parse(path.read_text())
    guarded = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full"
            assert node.module is not None
            # `from quire import x` may mean the module quire.x.
            names = [node.module]
            if node.module == "quire":
                names = [_resolve(alias.name) for alias in node.names]
        for name in names:
            if name.split(".")[0] == "quire":
                yield name, id(node) in guarded


def _resolve(name: str) -> str:
    is_module = (PACKAGE / f"{name}.py").exists() or (PACKAGE / name).is_dir()
    return f"quire.{name}" if is_module else "quire"


def allowed(importer: str, target: str, typing_only: bool) -> bool:
    here, there = part_of(importer), part_of(target)
    if here == there:
        return True
    if typing_only and (here, there) in TYPING_ONLY:
        return True
    short = target.removeprefix("quire.")
    return there in MAY_IMPORT[here] or short in MAY_IMPORT[here]


def test_every_part_of_the_package_has_a_place():
    assert {part_of(name) for name, _ in MODULES} == MAY_IMPORT.keys()


@pytest.mark.parametrize(("module", "path"), MODULES, ids=[name for name, _ in MODULES])
def test_imports_go_downwards_only(module, path):
    wrong = [
        target for target, typing_only in imported(path) if not allowed(module, target, typing_only)
    ]
    assert not wrong, f"{module} may not import {wrong}: see docs/architecture.md"


@pytest.mark.parametrize("part", ["sim", "replay"])
def test_nothing_imports_the_simulators_but_the_command_line(part):
    users = {
        part_of(name)
        for name, path in MODULES
        for target, _ in imported(path)
        if part_of(target) == part and target != "quire.replay.profile"  # figures of a machine
    }
    assert users == {part, "cli"}


def test_the_rules_notice_a_wrong_import():
    assert not allowed("quire.tree", "quire.manager.core", False)
    assert not allowed("quire.eviction.lru", "quire.tree", False)
    assert allowed("quire.eviction.lru", "quire.tree", True)
    assert not allowed("quire.manager.core", "quire.memory.device", True)
    assert allowed("quire.manager.core", "quire.memory.allocator", False)
    assert not allowed("quire.store.file", "quire.worker.store_tasks", False)
    assert not allowed("quire.worker.store_tasks", "quire.manager", False)
    assert not allowed("quire.router.proxy", "quire.server.service", False)
    assert not allowed("quire.web.guards", "quire.engine.messages", True)
    assert not allowed("quire.text.prompting", "quire.web.errors", False)


@pytest.mark.parametrize(
    "module", ["quire", "quire.manager", "quire.worker", "quire.sim", "quire.store", "quire.cli"]
)
def test_importing_the_leader_and_the_command_line_loads_no_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_core_takes_time_and_chance_from_its_constructors():
    """Rule 11 of the style: no clock, no randomness, no thread, no I/O in the leader."""
    banned = {"time", "random", "threading", "socket", "os", "io", "pathlib", "subprocess", "torch"}
    leader = {"keys", "tree", "components", "eviction", "manager", "config"}
    for name, path in MODULES:
        if part_of(name) in leader:
            for node in ast.walk(ast.parse(path.read_text())):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom):
                    names = [node.module or ""]
                assert not {n.split(".")[0] for n in names} & banned, name


def test_what_has_one_place_is_written_there_only():
    """Progress was defined fifteen times, and a child died with its parent in three ways."""
    defined = {"Progress": [], "Share": [], "Count": [], "Ticks": []}
    for name, path in MODULES:
        for node in ast.parse(path.read_text()).body:
            for target in node.targets if isinstance(node, ast.Assign) else []:
                if ast.unparse(target) in defined and "Callable" in ast.unparse(node.value):
                    defined[ast.unparse(target)].append(name)
    assert set(map(tuple, defined.values())) == {("quire.progress",)}
    leaving = [name for name, path in MODULES if "_EXIT_ORPHAN" in path.read_text()]
    assert leaving == ["quire.child"]
    # Addresses that people give; keyfile only looks at one that has been asked already.
    rooms = {"peer", "web", "server", "engine", "disagg", "settings"}
    splitting = {name for name, path in MODULES if "urlsplit(" in path.read_text()}
    assert {name for name in splitting if part_of(name) in rooms} == {
        "quire.peer.address",
        "quire.web.keyfile",
    }
