"""Memory of long sessions with sliding windows: full layers × length + window layers × window.

With pages of PAGE tokens, and per session:

    length   the full pages of computed tokens; the last token of an answer is never computed. While
             it runs, also the page that is being filled.
    window   the pages that hold the WINDOW - 1 tokens before a page boundary, and one that is kept
             to spare (quire.components.window). While it runs, also the page that is being filled.

So what is held of full layers is known to the page, and what is held of window layers within one
page per layer, however long the session is.
"""

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

import gemma
import hybrid_models
from e2e.exactness.rig import EngineRig, engine_rig
from e2e.exactness.subjects import GEMMA, PAGE, TINY_SUBJECTS, Prompt, Subject
from quire.engine.messages import TierStatus
from quire.engine.request import Request
from quire.manager import CacheManager
from quire.manager.upkeep import Upkeep

CHUNK = 64
"""Tokens of a step: prompts are longer."""
FULL, WINDOW = "full", "window"
TINY_WINDOWED = [subject for subject in TINY_SUBJECTS if WINDOW in subject.components]


@dataclass(frozen=True)
class Plan:
    """What is asked of a model: prompts go beyond its window at once."""

    subject: Subject
    window: int
    """Tokens that a token of a window layer sees, itself included."""
    num_prompt: int
    num_added: int
    """New tokens of each further turn."""
    num_answer: int
    num_turns: int
    num_sessions: int = 1

    def __str__(self) -> str:
        return f"{self.subject}-{self.num_sessions}"

    @property
    def window_pages(self) -> int:
        return -(-(self.window - 1) // PAGE)


class Sessions:
    """Conversations with nothing in common, and what the cache is to hold of them."""

    def __init__(self, plan: Plan, rig: EngineRig) -> None:
        self._plan = plan
        self._rig = rig
        self._unread = 0
        self._texts: list[Prompt] = [[] for _ in range(plan.num_sessions)]
        self.num_checked = 0
        """Steps of decoding that were looked at."""

    def turn(self) -> None:
        """Each says something and is answered; then nothing moves any more."""
        for text in self._texts:
            text.extend(self._read(self._plan.num_added if text else self._plan.num_prompt))
        with self._watching():
            answers = self._rig.answer(self._texts, self._plan.num_answer)
        for text, answer in zip(self._texts, answers, strict=True):
            text.extend(answer.tokens)
        self._rig.settle()
        self._check_at_rest()

    def _read(self, count: int) -> Prompt:
        self._unread += count
        return self._plan.subject.cut(self._unread - count, count)

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        step = self._rig.engine.step

        def watched() -> bool:
            busy = step()
            self._check_while_running()
            return busy

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self._rig.engine, "step", watched)
            yield

    # ---- what is due ----------------------------------------------------------------------------

    def _check_at_rest(self) -> None:
        """The device and the host hold the same, since every page has been copied."""
        num_sessions = self._plan.num_sessions
        length = sum((len(text) - 1) // PAGE for text in self._texts)
        window = num_sessions * self._plan.window_pages
        page_bytes = bytes_of_pages(self._plan.subject)
        for tier in ("device", "host"):
            used = self._used(tier)
            assert used[FULL] == length
            assert window <= used[WINDOW] <= window + num_sessions
            held = sum(s.used_pages * s.page_bytes for s in self._tier(tier))
            due = length * page_bytes[FULL] + window * page_bytes[WINDOW]
            assert 0 <= held - due <= num_sessions * page_bytes[WINDOW]

    def _check_while_running(self) -> None:
        scheduler, num_sessions = self._rig.engine.scheduler, self._plan.num_sessions
        running = scheduler.running
        if scheduler.waiting or not running:
            return
        full = sum(map(full_pages, running)) + self._pages_of_those_answered(running)
        device, host = self._used("device"), self._used("host")
        assert device[FULL] == full
        assert host[FULL] <= full
        # Sessions that were answered have a window at rest, as those that run have theirs.
        window = num_sessions * self._plan.window_pages
        filling = sum(request.computed % PAGE > 0 for request in running)
        assert host[WINDOW] <= window + num_sessions
        if all(request.num_output for request in running):
            self.num_checked += 1
            assert window + filling <= device[WINDOW] <= window + num_sessions + filling
        else:
            assert device[WINDOW] <= window + num_sessions + CHUNK // PAGE + len(running)

    def _pages_of_those_answered(self, running: Sequence[Request]) -> int:
        """In this turn, while others still run."""
        starts = {tuple(request.tokens[:PAGE].tolist()) for request in running}
        answered = [text for text in self._texts if tuple(text[:PAGE]) not in starts]
        assert len(answered) + len(running) == len(self._texts)
        return sum((len(text) + self._plan.num_answer - 1) // PAGE for text in answered)

    def _tier(self, tier: str) -> list[TierStatus]:
        return [status for status in self._rig.engine.tiers() if status.name == tier]

    def _used(self, tier: str) -> dict[str, int]:
        return {status.component: status.used_pages for status in self._tier(tier)}


def full_pages(request: Request) -> int:
    """Those of its computed tokens; from the start all that its prompt and one token need."""
    return -(-max(request.computed, request.num_prompt + 1) // PAGE)


def bytes_of_pages(subject: Subject) -> dict[str, int]:
    """By component: its layers × keys and values of PAGE tokens, in float32."""
    config = json.loads((subject.find() / "config.json").read_text())
    layer = 2 * PAGE * config["num_key_value_heads"] * config["head_dim"] * 4
    kinds = config["layer_types"]
    return {
        FULL: kinds.count("full_attention") * layer,
        WINDOW: kinds.count("sliding_attention") * layer,
    }


PLANS = [
    *(Plan(subject, hybrid_models.WINDOW, 165, 37, 90, 4) for subject in TINY_WINDOWED),
    *(Plan(subject, hybrid_models.WINDOW, 165, 37, 60, 3, 3) for subject in TINY_WINDOWED),
    pytest.param(Plan(GEMMA, gemma.WINDOW, 600, 25, 40, 2), marks=pytest.mark.long),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_session_holds_its_full_pages_and_one_window_c23(plan: Plan) -> None:
    with engine_rig(plan.subject, chunk_tokens=CHUNK) as rig:
        sessions = Sessions(plan, rig)
        for _ in range(plan.num_turns):
            sessions.turn()
        assert sessions.num_checked >= plan.num_turns * (plan.num_answer - 5)


def test_windows_that_are_never_released_are_noticed_c23(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: in this build every page keeps its window, and does not mind."""
    monkeypatch.setattr(CacheManager, "check_invariants", lambda _self: None)
    monkeypatch.setattr(Upkeep, "_release_windows", lambda _self, _node, _window: [])
    plan = PLANS[0]
    with (
        engine_rig(plan.subject, chunk_tokens=CHUNK) as rig,
        pytest.raises(AssertionError, match=r"assert \d+ <= "),
    ):
        Sessions(plan, rig).turn()
