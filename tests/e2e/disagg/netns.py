"""Networks of their own for processes, with links between them that can be cut and stalled; or
with a switch between them, to which each has a line that carries so much and no more.

    decode ──veth── prefill 1                 decode 1 ──┐        ┌── prefill 1
       └─────veth── prefill 2                 decode 2 ──┴ Switch ┴── prefill 2

Needs root, `ip` and `tc`, and a system that lets it make namespaces: `why_not()` says what is
missing, `why_no_shaping()` for the lines of a switch.
A process started within `Network.inside()` lives there; a socket opened there stays there.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_WRONG_ADDRESS = "02:00:00:00:00:99"
_numbers = itertools.count(os.getpid())
"""Of names and addresses: those in the home network are seen by other processes too."""


@cache
def why_not() -> str:
    """Why links cannot be tested here; empty: they can."""
    if not shutil.which("ip"):
        return "there is no `ip` command (iproute2)"
    if os.geteuid():
        return "making network namespaces needs root"
    try:
        with Network(), Network():
            pass
    except (subprocess.CalledProcessError, OSError) as error:
        return f"network namespaces cannot be made here: {error}"
    return ""


@cache
def why_no_shaping() -> str:
    """Why lines cannot be made slow here; empty: they can."""
    if reason := why_not():
        return reason
    if not shutil.which("tc"):
        return "there is no `tc` command (iproute2)"
    try:
        with Network() as hub, Network() as other:
            Switch(hub).join(other, 1000)
    except (subprocess.CalledProcessError, OSError) as error:
        return f"lines cannot be shaped here: {error}"
    return ""


class Network:
    """A namespace with a loopback; use it in a `with`."""

    def __init__(self) -> None:
        self.name = f"quire-{os.getpid()}-{next(_numbers)}"

    def __enter__(self) -> Network:
        _ip("netns", "add", self.name)
        try:
            self.ip("link", "set", "lo", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        _ip("netns", "delete", self.name)

    def ip(self, *arguments: str) -> None:
        _ip("-netns", self.name, *arguments)

    def tc(self, *arguments: str) -> None:
        _run("tc", "-netns", self.name, *arguments)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """This thread is there, and what it starts."""
        with (
            Path("/proc/thread-self/ns/net").open() as home,
            Path("/run/netns", self.name).open() as there,
        ):
            _enter(there.fileno())
            try:
                yield
            finally:
                _enter(home.fileno())


class Home:
    """The network in which this process was started, all of its threads."""

    def ip(self, *arguments: str) -> None:
        _ip(*arguments)

    def tc(self, *arguments: str) -> None:
        _run("tc", *arguments)


class Link:
    """Between two networks, each with one address at it."""

    def __init__(self, left: Network | Home, right: Network) -> None:
        number = next(_numbers)
        self._ends = [
            (left, f"q{number}a", f"10.77.{number % 256}.1"),
            (right, f"q{number}b", f"10.77.{number % 256}.2"),
        ]
        (_, here, _), (_, there, _) = self._ends
        left.ip(
            "link", "add", here, "type", "veth", "peer", "name", there, "netns", right.name
        )  # goes with either namespace
        for network, device, address in self._ends:
            network.ip("address", "add", f"{address}/24", "dev", device)
            network.ip("link", "set", device, "up")

    @property
    def left(self) -> str:
        """Address of that end."""
        return self._ends[0][2]

    @property
    def right(self) -> str:
        return self._ends[1][2]

    def cut(self) -> None:
        """Both sides see that there is no link any more; new connections are refused."""
        for network, device, _ in self._ends:
            network.ip("link", "set", device, "down")

    def mend(self) -> None:
        for network, device, _ in self._ends:
            network.ip("link", "set", device, "up")

    def stall(self) -> None:
        """Everything that is sent gets lost, and nobody is told."""
        for (network, device, _), (_, _, address) in zip(
            self._ends, reversed(self._ends), strict=True
        ):
            network.ip(
                *("neighbour", "replace", address, "lladdr", _WRONG_ADDRESS),
                *("dev", device, "nud", "permanent"),
            )

    def go_on(self) -> None:
        for (network, device, _), (_, _, address) in zip(
            self._ends, reversed(self._ends), strict=True
        ):
            network.ip("neighbour", "delete", address, "dev", device)

    def shape(self, kbit_s: int) -> None:
        """It carries so much each way, and no more."""
        for network, device, _ in self._ends:
            _shape(network, device, kbit_s)

    def widen(self) -> None:
        for network, device, _ in self._ends:
            network.tc("qdisc", "delete", "dev", device, "root")


_QUEUE_MS = 200
"""What does not leave a line in so long is thrown away, as by any router."""
_BURST_BYTES = 16 << 10


def _shape(network: Network | Home, device: str, kbit_s: int) -> None:
    network.tc(
        *("qdisc", "add", "dev", device, "root", "tbf"),
        *("rate", f"{kbit_s}kbit", "burst", str(_BURST_BYTES), "latency", f"{_QUEUE_MS}ms"),
    )


class Switch:
    """Several networks that reach each other, and `hub` them, by an address each."""

    def __init__(self, hub: Network) -> None:
        self._hub = hub
        self._number = next(_numbers)
        self._bridge = f"q{self._number}s"
        hub.ip("link", "add", self._bridge, "type", "bridge")
        hub.ip("address", "add", f"{self.address(1)}/24", "dev", self._bridge)
        hub.ip("link", "set", self._bridge, "up")
        self._hosts = itertools.count(2)

    def address(self, host: int) -> str:
        return f"10.78.{self._number % 256}.{host}"

    def join(self, network: Network, kbit_s: int) -> str:
        """Its address there; its line carries so much each way."""
        host = next(self._hosts)
        here, there = f"q{self._number}h{host}", f"q{self._number}n{host}"
        self._hub.ip(
            "link", "add", here, "type", "veth", "peer", "name", there, "netns", network.name
        )
        self._hub.ip("link", "set", here, "master", self._bridge)
        network.ip("address", "add", f"{self.address(host)}/24", "dev", there)
        for end, device in ((self._hub, here), (network, there)):
            end.ip("link", "set", device, "up")
            _shape(end, device, kbit_s)
        return self.address(host)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=30)


def _enter(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
