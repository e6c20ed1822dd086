"""Conversations for the tests: some text each, so that there are pages to keep."""

from __future__ import annotations

from e2e.serving.client import Messages

PLACES = ("harbour", "mill", "station", "library", "orchard", "lighthouse", "market", "quarry")
_ABOUT = (
    "The {place} lies at the end of a long road. Every morning people come before dawn and stay "
    "until the light goes. There are three sheds, a crane that nobody uses any more, and a small "
    "house where the keeper of the {place} writes down who came, what they carried, and how much "
    "was paid for it. "
)


def first_turn(place: str) -> Messages:
    return [{"role": "user", "content": _ABOUT.format(place=place) + "Who writes it down?"}]


def next_turn(messages: Messages, answer: str) -> Messages:
    return [
        *messages,
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "And what is nobody using any more?"},
    ]
