"""NIXL: reads from memory that another process has registered, by RDMA, NVLink, shared memory or
TCP, whichever UCX finds.

Knows NIXL's Python interface and nothing of pages. Imported only where `peer_transport` is nixl.
What is read goes into buffers of ours. A read that is given up may still write into its buffer, so
that is used for nothing else until NIXL has let go of it:

    borrow ──▶ in use ──read, copied from──▶ give_back ──▶ free
                   └──read given up──▶ NIXL's ──ended──▶ free
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.errors import ConfigError
from quire.peer.errors import PeerError

_POLL_S = 0.0003
_BUFFER_BYTES = 16 << 20
"""At least."""
_RUNNING, _DONE = "PROC", "DONE"

ByteSpan = tuple[int, int]
"""Address and length."""
Buffer = npt.NDArray[np.uint8]


class NixlAgent:
    """One of a process is enough. Any thread may use it."""

    def __init__(self) -> None:
        """Raises ConfigError if NIXL is not installed, or finds nothing to move bytes with."""
        try:
            from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t
        except ImportError as error:
            raise ConfigError(
                f"peer_transport is nixl, but NIXL cannot be loaded ({error}): install "
                "quire[nixl], or set peer_transport to auto or tcp"
            ) from error
        logging.getLogger("nixl").setLevel(logging.WARNING)
        self.name = f"quire-{secrets.token_hex(8)}"
        config = nixl_agent_config(
            backends=["UCX"], sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        )
        try:
            self._agent: Any = nixl_agent(self.name, config)
        except Exception as error:  # NIXL raises types of its own: it cannot be used, that is all
            raise ConfigError(
                f"peer_transport is nixl, but NIXL cannot start ({error}): set it to auto or tcp"
            ) from error
        self._meeting = threading.Lock()
        self._met: Counter[str] = Counter()
        """How many connections use what is known of it."""
        self._lock = threading.Lock()
        """Of all that follows."""
        self._free: list[Buffer] = []
        self._given_up: list[tuple[Any, Buffer]] = []
        """Reads that may still write, and where."""

    def register(self, address: int, size_bytes: int) -> Callable[[], None]:
        """Others may read it, and we may read into it, until what this returns is called. Raises
        PeerError."""
        agent = self._agent
        try:
            found = agent.register_memory([(address, size_bytes, 0, "")], "DRAM")
        except Exception as error:  # as above
            raise PeerError(
                f"{size_bytes} bytes cannot be registered with NIXL ({error}): raise the limit of "
                "locked memory, or set peer_transport to tcp"
            ) from error
        return lambda: agent.deregister_memory(found)

    def borrow(self, size_bytes: int) -> Buffer:
        """To read into, once; to be given back, unless read() has raised. Raises PeerError."""
        with self._lock:
            self._tidy()
            for i, buffer in enumerate(self._free):
                if buffer.nbytes >= size_bytes:
                    return self._free.pop(i)
        buffer = np.zeros(max(size_bytes, _BUFFER_BYTES), dtype=np.uint8)
        self.register(buffer.ctypes.data, buffer.nbytes)
        return buffer

    def give_back(self, buffer: Buffer) -> None:
        with self._lock:
            self._free.append(buffer)

    def close(self) -> None:
        """Before what is registered goes away. Nothing is read from here on."""
        self._agent = None

    def metadata(self) -> bytes:
        """What another agent must know to read what is registered by now."""
        return bytes(self._agent.get_agent_metadata())

    def meet(self, name: str, metadata: bytes) -> None:
        """Another agent, by what it says of itself. Whoever meets it forgets it, once. Raises
        PeerError."""
        with self._meeting:
            if not self._met[name]:  # met again, it would lose what is under way
                self._introduce(name, metadata)
            self._met[name] += 1

    def _introduce(self, name: str, metadata: bytes) -> None:
        try:
            found = self._agent.add_remote_agent(metadata)
        except Exception as error:  # as above
            raise PeerError(f"the peer's memory cannot be reached by NIXL ({error})") from error
        if found not in (name, name.encode()):
            raise PeerError("the other side does not keep to the protocol")

    def forget(self, name: str) -> None:
        """Nothing of it is being read by who says this."""
        with self._meeting:
            self._met[name] -= 1
            if self._met[name]:
                return
            del self._met[name]
            try:
                self._agent.remove_remote_agent(name)
            except Exception as error:  # it is gone already, or we are
                logging.getLogger(__name__).debug("%s: %s", name, error)

    def read(
        self,
        name: str,
        theirs: Sequence[ByteSpan],
        buffer: Buffer,
        ours: Sequence[ByteSpan],
        check: Callable[[], object],
    ) -> None:
        """Each span of theirs into one of ours, which lie in the buffer. Raises PeerError, and what
        `check` raises, which is asked while it waits: then the buffer is not the caller's any
        more."""
        handle = None
        try:
            near, far = (
                self._agent.get_xfer_descs([(*span, 0) for span in spans], "DRAM")
                for spans in (ours, theirs)
            )
            handle = self._agent.initialize_xfer("READ", near, far, name)
            state = self._agent.transfer(handle)
            while state == _RUNNING:
                check()
                time.sleep(_POLL_S)
                state = self._agent.check_xfer_state(handle)
        except (OSError, PeerError):  # of check: not NIXL's
            self._give_up(handle, buffer)
            raise
        except Exception as error:  # NIXL raises types of its own
            self._give_up(handle, buffer)
            raise PeerError(f"reading by NIXL failed ({error})") from error
        if state != _DONE:
            self._give_up(handle, buffer)
            raise PeerError(f"reading by NIXL failed ({state})")
        self._agent.release_xfer_handle(handle)

    def _give_up(self, handle: Any, buffer: Buffer) -> None:
        with self._lock:
            if handle is None:  # it never began
                self._free.append(buffer)
            else:
                self._given_up.append((handle, buffer))

    def _tidy(self) -> None:
        """Take back what NIXL has ended by now. With the lock held."""
        left = []
        for handle, buffer in self._given_up:
            if self._has_ended(handle):
                self._free.append(buffer)
            else:
                left.append((handle, buffer))
        self._given_up = left

    def _has_ended(self, handle: Any) -> bool:
        try:
            if self._agent.check_xfer_state(handle) == _RUNNING:
                return False
        except Exception as error:  # it has failed, which is an end
            logging.getLogger(__name__).debug("a read that was given up: %s", error)
        try:
            self._agent.release_xfer_handle(handle)
        except Exception:  # it cannot be released yet
            return False
        return True
