"""StepPrices: what a step with proposals costs beside one without, as measured.

One estimate for each rough number of requests that decode together: 1, 2, 3–4, 5–8, … What is
believed before is scaled by how much dearer such steps then were; old ones count less and less. Now
and then a step without proposals is needed to compare with. Knows neither requests nor models.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.engine.draft.adaptive import DraftPrice

_BELIEVED = DraftPrice(per_token=0.06, fixed=0.05)
_BELIEF = 4.0
"""What is believed before counts like so many steps."""
_DECAY = 0.97
_HELD_UP = 3.0
"""A step that took so many times as long as a plain one was held up by something else."""
_FIRST_PLAIN = 4
"""Steps without proposals before there are any."""
_FRESH_STEPS = 64
"""After so many steps with proposals, one without is due."""


@dataclass(slots=True)
class _Measured:
    """Steps of about so many requests."""

    plain_s: float
    """Of a step without proposals."""
    num_plain: int = 1
    age: int = 0
    """Steps since there was one."""
    dearer: float = 0.0
    """Σ of what steps with proposals cost more, and …"""
    believed: float = 0.0
    """… Σ of what that was believed to be."""

    @property
    def scale(self) -> float:
        belief = _BELIEF * _BELIEVED.per_token
        return max(0.0, self.dearer + belief) / (self.believed + belief)


@dataclass(slots=True)
class StepPrices:
    _measured: dict[int, _Measured] = field(default_factory=dict)

    def observe(self, num_requests: int, num_tokens: int, seconds: float) -> None:
        """A step that did nothing but decode."""
        known = self._measured.get(_class_of(num_requests))
        if num_tokens == num_requests:
            if known is None:
                self._measured[_class_of(num_requests)] = _Measured(seconds)
            else:
                known.num_plain = min(known.num_plain + 1, _FIRST_PLAIN)
                # One that was held up says nothing of the others.
                seconds = min(seconds, _HELD_UP * known.plain_s)
                known.plain_s += (seconds - known.plain_s) / known.num_plain
                known.age = 0
        elif known is not None:
            known.age += 1
            believed = _BELIEVED.cost((num_tokens - num_requests) / num_requests) - 1
            dearer = min(seconds / known.plain_s, _HELD_UP) - 1
            known.dearer = known.dearer * _DECAY + dearer
            known.believed = known.believed * _DECAY + believed

    def price(self, num_requests: int) -> DraftPrice | None:
        """None: let there be a step without proposals."""
        known = self._measured.get(_class_of(num_requests))
        if known is None or known.num_plain < _FIRST_PLAIN or known.age >= _FRESH_STEPS:
            return None
        scale = known.scale
        return DraftPrice(_BELIEVED.per_token * scale, _BELIEVED.fixed * scale)


def _class_of(num_requests: int) -> int:
    return (num_requests - 1).bit_length()
