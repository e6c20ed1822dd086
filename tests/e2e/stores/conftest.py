"""Stores that a cluster shares, each on its real server (S3: a test double), by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from store_servers import Mooncake, Moto, Valkey

Open = Callable[[str], str]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], object]]:
    """The server of that kind, started when it is first asked for."""
    made: dict[str, Valkey | Moto | Mooncake] = {}
    kinds = {"redis": Valkey, "s3": Moto, "mooncake": _big_pool}
    with ExitStack() as stack:

        def start(kind: str) -> object:
            if kind == "s3":
                for package in ("moto", "flask_cors", "obstore"):
                    pytest.importorskip(
                        package, reason=f"no {package} here: pip install 'quire[dev]'"
                    )
            if kind not in made:
                made[kind] = kinds[kind](tmp_path_factory.mktemp(kind))
                stack.callback(made[kind].stop)
            return made[kind]

        yield start


def _big_pool(folder: Path) -> Mooncake:
    return Mooncake(folder, holder_bytes=512 << 20)


@pytest.fixture
def store_url(
    servers: Callable[[str], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Open:
    """By name: file, memory, redis, s3, mooncake; `redis+zstd`; `redis before file`. Nothing of
    another test is in it."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tests")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "tests")

    def find(name: str) -> str:
        if " before " in name:
            first, second = name.split(" before ")
            return f"{find(first)} {find(second)}&write=back"
        if name == "memory":
            return "memory://"
        kind, _, codec = name.partition("+")
        url = (
            f"file://{tmp_path}/store?max=2GiB" if kind == "file" else _url(servers(kind), tmp_path)
        )
        return f"{url}&codec={codec}" if codec else url

    return find


def _url(server: object, tmp_path: Path) -> str:
    assert isinstance(server, Valkey | Moto | Mooncake)
    own = tmp_path.name
    if isinstance(server, Moto):
        return server.url.replace("/cache?", f"/{own}?")
    sign = "&" if "?" in server.url else "?"
    return f"{server.url}{sign}prefix={own}:"
