"""Working sets: sessions that come back turn by turn, on a device that holds all of them or a
quarter; with the device alone, with host memory for all of them, with host memory for half of them,
and with that and a store.

Each round asks every session once, in an order of its own, a few at a time; each prompt is all
that was said before and some more.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from quire.bench import Result, TokenArray
from quire.bench.gpu.driving import Drive, Heard
from quire.bench.gpu.rig import Rig
from quire.bench.gpu.times import GREEDY
from quire.types import Tier

_TIERS = ("device", "host", "store")


@dataclass(frozen=True, slots=True)
class _Host:
    name: str
    share: float
    """Of the whole set."""
    with_store: str = ""
    """Its name with a store; what that adds is seen beside as much host memory without one."""


_HOSTS = (
    _Host("L1", 0),
    _Host("L1+L2", 1.25),
    _Host("L1+half L2", 0.5, with_store="L1+half L2+L3"),
)


def measure(rig: Rig) -> Iterator[Result]:
    """One row per tiers and set, as they come; in it, one per round."""
    for host in _HOSTS:
        yield from _with(rig, host)


def _with(rig: Rig, host: _Host) -> Iterator[Result]:
    plan = rig.plan.sets
    pages = plan.sessions * -(-plan.session_tokens // rig.plan.page_size)
    set_bytes = pages * rig.plan.page_size * rig.needs.kv_bytes
    with rig.engine(
        device_bytes=int(set_bytes / plan.times_device), host_bytes=int(set_bytes * host.share)
    ) as drive:
        yield from _sets(rig, drive, host.name)
        if host.with_store:
            rig.attach(drive)
            yield from _sets(rig, drive, host.with_store)


def _sets(rig: Rig, drive: Drive, name: str) -> Iterator[Result]:
    plan = rig.plan.sets
    for sessions in (plan.sessions, plan.fitting):
        rounds = _rounds(rig, drive, sessions, name)
        times = plan.times_device * sessions / plan.sessions
        yield {"tiers": name, "times_device": times, "rounds": rounds}
        drive.forget(Tier.DEVICE, Tier.HOST)


def later(row: Result, figure: str) -> float:
    """The mean over the rounds in which there was something to reuse."""
    return float(statistics.mean(one[figure] for one in row["rounds"][1:]))


def _rounds(rig: Rig, drive: Drive, sessions: int, name: str) -> list[Result]:
    plan = rig.plan.sets
    said = [rig.prompt(plan.tokens) for _ in range(sessions)]
    params = msgspec.structs.replace(GREEDY, max_tokens=plan.answer_tokens)
    rounds = []
    for number in range(plan.rounds):
        rig.progress(f"{sessions} sessions, {name}", number, plan.rounds)
        order = rig.shuffled(sessions)
        heard = drive.answer_all([said[i] for i in order], params, plan.at_once)
        rounds.append(_round([said[i] for i in order], heard))
        for i, one in zip(order, heard, strict=True):
            answer = np.array(one.tokens, dtype=np.int32)
            said[i] = np.concatenate((said[i], answer, rig.prompt(plan.turn_tokens)))
    return rounds


def _round(prompts: Sequence[TokenArray], heard: Sequence[Heard]) -> Result:
    num_tokens = sum(len(prompt) for prompt in prompts)
    seconds = max(one.times_s[-1] for one in heard) - min(one.asked_s for one in heard)
    cached = [one.cached for one in heard if one.cached is not None]
    found = {tier: sum(getattr(one, tier) for one in cached) / num_tokens for tier in _TIERS}
    firsts = sorted(one.first_token_s for one in heard)
    return {
        "hit": sum(found.values()),
        "found": found,
        "ttft_s": statistics.mean(firsts),
        "ttft_median_s": statistics.median(firsts),
        "requests_s": len(heard) / seconds,
    }
