"""Requests, sizes, policies and faults as they come by chance, for any tiny model, by seed.

What single scenarios do one by one happens here together: conversations that branch and go on,
prompts that arrive while others are computed, aborts, tenants, tiers that lose what they hold,
stores that lie. Every answer must be the oracle's. Also for two engines that step in turn.
"""

import os
import random
import time
from typing import Any

from e2e.exactness.oracle import differences, reference
from e2e.exactness.rig import PATIENCE_S, EngineRig, collect
from e2e.exactness.subjects import DENSE_SUBJECTS, PAGE, TINY_LLAMA, TINY_SUBJECTS, Prompt, Subject
from quire.config import PrefetchPolicy, WritePolicy
from quire.engine.messages import AbortRequest, Output
from quire.types import RequestId, Tier

FRESH_S = float(os.environ.get("QUIRE_CHAOS_S", "60"))
"""For seeds that nobody has run."""
LONGEST = 290
"""Tokens of a prompt: with its answer it fits into the smallest device."""
NOISE = 5e-3
"""Stock Qwen3-Next differs from itself by 3e-3 when given such a prompt 16 tokens at a time."""
_FAULTS = "drop=0.05&truncate=0.03&corrupt=0.05&raise=0.05"


class Chaos:
    def __init__(self, seed: int) -> None:
        self.random = rng = random.Random(seed)
        plain = [TINY_LLAMA, *DENSE_SUBJECTS]
        self.subject: Subject = rng.choice(plain if rng.random() < 0.3 else TINY_SUBJECTS)
        self._seed = seed
        self._said: list[Prompt] = []
        """Prompts with their answers, to go on from."""

    # ---- engines --------------------------------------------------------------------------------

    def store(self, folder: str) -> str | None:
        where = f"file://{folder}?max={self.random.choice(['2GiB', '1MiB', '300KiB'])}"
        faulty = f"faulty+{where}&{_FAULTS}&seed={self._seed}"
        return self.random.choice([None, *[where] * 4, faulty, faulty])

    def pools(self) -> dict[str, int]:
        return {
            "device_pages": self.random.choice([30, 40, 64, 256]),
            "host_pages": self.random.choice([24, 64, 512, 512]),
            "snapshots": self.random.choice([6, 16, 64, 64]),
        }

    def options(self) -> dict[str, Any]:
        choose = self.random.choice
        drafts = ["off"] if "recurrent" in self.subject.components else ["off", "ngram"]
        return {
            "chunk_tokens": choose([16, 24, 64, 512]),
            "max_running": choose([1, 2, 8]),
            "write_policy": choose([*WritePolicy, *[WritePolicy.WRITE_THROUGH] * 3]),
            "prefetch_policy": choose([*PrefetchPolicy, *[PrefetchPolicy.WAIT_COMPLETE] * 3]),
            "prefetch_threshold": choose([16, 16, 48]),
            "overlap": choose([None, True]),
            "snapshot_every": choose([0, 0, 32]),
            "snapshots_per_path": choose([1, 2, 8]),
            "tenant_share": choose([50, 100, 100]),
            "speculate": choose(drafts),
        }

    # ---- requests -------------------------------------------------------------------------------

    def run(self, rig: EngineRig, rounds: int) -> int:
        """So many times some requests together, and perhaps something is lost. How many were
        answered."""
        answered = 0
        for _ in range(rounds):
            answered += self._ask(rig)
            lost = self.random.choice(
                [(), (Tier.DEVICE,), (Tier.DEVICE,), (Tier.DEVICE, Tier.HOST)]
            )
            if lost:
                rig.flush(*lost)
        rig.settle()
        assert not rig.manager.leases
        return answered

    def _ask(self, rig: EngineRig) -> int:
        salt = self.random.choice([*[""] * 7, "tenant"])
        asked: dict[RequestId, tuple[Prompt, int]] = {}
        outputs: list[Output] = []
        for _ in range(self.random.randint(1, 5)):
            prompt, num_tokens = self._prompt(), self.random.choice([1, 3, 12, 24])
            name = rig.begin(prompt, num_tokens, salt)
            outputs += rig.steps(self.random.choice([0, 0, 1, 3, 6]))
            if self.random.random() < 0.1:
                rig.engine.handle(AbortRequest(name))
            else:
                asked[name] = prompt, num_tokens
        deadline = time.monotonic() + PATIENCE_S
        while sum(o.finish is not None for o in outputs if o.id in asked) < len(asked):
            assert time.monotonic() < deadline, f"not finished: {rig.engine.requests()}"
            outputs += rig.steps(1)
            if self.random.random() < 0.02:
                component = self.random.choice(rig.manager.components).name
                rig.manager.flush(self.random.choice([Tier.DEVICE, Tier.HOST]), component)
        for name, (prompt, num_tokens) in asked.items():
            answer = collect([output for output in outputs if output.id == name])
            differences(reference(self.subject, prompt, num_tokens), answer, noise=NOISE)
            self._said.append(prompt + answer.tokens)
        self._said = self._said[-12:]
        return len(asked)

    def _prompt(self) -> Prompt:
        choose, kind = self.random.randrange, self.random.random()
        if self._said and kind < 0.65:  # a conversation goes on, or another branches off it
            prompt = self.random.choice(self._said)
            prompt = prompt[: choose(1, len(prompt) + 1)] if self.random.random() < 0.3 else prompt
            prompt = prompt + self._text(60) if self.random.random() < 0.7 else prompt
        elif kind < 0.85:  # the same beginning as others
            prompt = self.subject.cut(0, choose(1, 200)) + self._text(50)
        else:
            prompt = self._text(260)
        prompt = prompt[:LONGEST]
        is_cut = self.random.random() < 0.2
        return prompt[: max(PAGE, len(prompt) // PAGE * PAGE)] if is_cut else prompt

    def _text(self, most: int) -> Prompt:
        return self.subject.cut(self.random.randrange(3500), self.random.randint(1, most))
