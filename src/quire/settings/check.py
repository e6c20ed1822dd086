"""Contradictions between options: each is raised with the names, what set them, and the fix.

Works on what was given and what it came to; repairs nothing. What only one option decides is
checked by its kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points

from quire.config import WritePolicy
from quire.engine.config import MIN_SECRET_CHARS, Role, weak_secret
from quire.errors import ConfigError, MemoryBudgetError
from quire.settings.machine import Machine
from quire.settings.options import OPTIONS, Settings
from quire.settings.sources import Loaded
from quire.settings.values import NONE
from quire.sizes import format_bytes
from quire.store.url import GROUP, split_urls


def check(loaded: Loaded, effective: Settings, machine: Machine) -> list[str]:
    """Warnings. Raises ConfigError, MemoryBudgetError."""
    _check_tiers(loaded, effective)
    _check_memory(loaded, effective, machine)
    _check_store(loaded, effective)
    _check_device(loaded, effective, machine)
    _check_keys(loaded)
    _check_role(loaded, effective)
    _check_peers(loaded, effective)
    return [*loaded.warnings, *_warnings(loaded, effective)]


def _check_tiers(loaded: Loaded, effective: Settings) -> None:
    if effective.host_memory:
        return
    host = f"{loaded.where('host_memory')} is 0"
    if effective.store != NONE:
        raise ConfigError(
            f"{loaded.where('store')}: the store is reached through host memory, and {host}: "
            "give host_memory a size, or set store to none"
        )
    if effective.write_policy is not WritePolicy.WRITE_THROUGH:
        raise ConfigError(
            f"{loaded.where('write_policy')} is {effective.write_policy.value}, which decides what "
            f"is copied to host memory, and {host}: give host_memory a size, or drop write_policy"
        )
    for name in ("prefetch_policy", "prefetch_threshold"):
        if loaded.origins[name].is_given:
            raise ConfigError(
                f"{loaded.where(name)} is about the store, which is reached through host memory, "
                f"and {host}: give host_memory a size, or drop {name}"
            )


def _check_memory(loaded: Loaded, effective: Settings, machine: Machine) -> None:
    """The worst cases early; what exactly fits is known when the pools are made."""
    host_bytes = effective.host_memory or 0
    device_bytes = (effective.device_memory or 0) if effective.device == "cpu" else 0
    if host_bytes + device_bytes <= machine.available_bytes:
        return
    names = [("host_memory", host_bytes), ("device_memory", device_bytes)]
    asked = " and ".join(
        f"{loaded.where(name)} for {format_bytes(size)}" for name, size in names if size
    )
    raise MemoryBudgetError(
        f"{asked} ask for more than the {format_bytes(machine.available_bytes)} available "
        f"({machine.memory_limit}): lower what is larger"
    )


def _check_store(loaded: Loaded, effective: Settings) -> None:
    if effective.store in (None, NONE):
        return
    assert effective.store is not None
    known = sorted({entry.name for entry in entry_points(group=GROUP)})
    unknown = [url.scheme for url in split_urls(effective.store) if url.scheme not in known]
    for scheme in unknown:
        raise ConfigError(
            f"{loaded.where('store')}: there are no {scheme!r} stores: known are {', '.join(known)}"
        )


def _check_device(loaded: Loaded, effective: Settings, machine: Machine) -> None:
    if effective.device == "cpu":
        return
    where, count = loaded.where("device"), len(machine.gpus)
    if not count:
        raise ConfigError(
            f"{where} is cuda, and torch can use no GPU here: use cpu, or install a CUDA build of "
            "torch and check the driver"
        )
    if effective.tp > count:
        raise ConfigError(
            f"{loaded.where('tp')} is {effective.tp}, and torch can use {count} GPU"
            f"{'' if count == 1 else 's'} here: set tp to at most {count}"
        )


def _check_keys(loaded: Loaded) -> None:
    settings = loaded.settings
    if settings.api_key is not None and settings.api_key == settings.admin_key:
        raise ConfigError(
            f"{loaded.where('admin_key')} equals {loaded.where('api_key')}, which would make every "
            "client an administrator: give two different keys"
        )


def _check_role(loaded: Loaded, effective: Settings) -> None:
    if effective.role is not Role.DECODE:
        for name in ("prefill", "decode_cache", "decode_restore"):
            if getattr(effective, name) != OPTIONS[name].default:
                raise ConfigError(
                    f"{loaded.where(name)} is for decode servers, and {loaded.where('role')} is "
                    f"{effective.role.value}: set role to decode, or drop {name}"
                )
    if (
        effective.decode_restore
        and loaded.origins["decode_restore"].is_given
        and not effective.decode_cache
    ):
        raise ConfigError(
            f"{loaded.where('decode_restore')} is true, and {loaded.where('decode_cache')} is "
            "false, so nothing is looked for in the own tiers: drop one of them"
        )


def _check_peers(loaded: Loaded, effective: Settings) -> None:
    """Whoever exchanges pages needs host memory for them and a secret to be known by."""
    if effective.peer_port is None:
        return
    if effective.role is not Role.UNIFIED:
        why = f"{loaded.where('role')} is {effective.role.value}"
    else:
        why = f"{loaded.where('peers' if effective.peers else 'peer_port')} is set"
    if not effective.host_memory:
        raise ConfigError(
            f"{why}, pages are exchanged through host memory, and "
            f"{loaded.where('host_memory')} is 0: give host_memory a size"
        )
    if not effective.peer_secret:
        raise ConfigError(
            f"{why}, and peer_secret is not set: give all servers that exchange pages the same "
            "long random text, as QUIRE_PEER_SECRET or in the file; on one machine too, where "
            "other users could connect"
        )
    if len(effective.peer_secret) < MIN_SECRET_CHARS:
        raise ConfigError(weak_secret(effective.peer_secret))
    if effective.peer_port + effective.tp > 65535:
        raise ConfigError(
            f"{loaded.where('peer_port')} is {effective.peer_port}, and each of {effective.tp} "
            "rank(s) takes a port after it, up to 65535: choose a lower one"
        )


def _warnings(loaded: Loaded, effective: Settings) -> Iterator[str]:
    if effective.device == "cpu" and effective.dtype != "float32":
        yield (
            f"{loaded.where('dtype')} is {effective.dtype}, which most CPUs compute several times "
            "slower than float32: leave it to auto"
        )
    automatic = loaded.settings.store is None and loaded.settings.host_memory != 0
    if automatic and effective.store == NONE:
        yield "the disk is nearly full, so no store is used: free some space, or give store a URL"
