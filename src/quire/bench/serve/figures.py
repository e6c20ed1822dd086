"""The result of `quire bench serve`, summed up from its samples as a plain dict.

Unknown stays unknown: a server that does not say how much was cached has no hit rate, not one of
zero, and requests whose usage is missing are left out of what needs it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from quire.bench import Result
from quire.bench.serve.chatting import ANYWHERE, TIERS, ChatAnswer, Verdict
from quire.bench.stats import summary
from quire.errors import EngineError


@dataclass(frozen=True, slots=True)
class Sample:
    session: str
    round: int
    """From 1."""
    started_s: float
    """Since the beginning of the run."""
    answer: ChatAnswer


def result(about: Mapping[str, Any], samples: Sequence[Sample], duration_s: float) -> Result:
    """Raises EngineError when not one answer was good."""
    good = [sample for sample in samples if sample.answer.verdict is Verdict.GOOD]
    problems = Counter(s.answer.problem for s in samples if s.answer.problem)
    if not good:
        worst = problems.most_common(1)[0][0] if problems else "none was made"
        raise EngineError(f"none of {len(samples)} requests was answered: {worst}")
    verdicts = Counter(sample.answer.verdict for sample in samples)
    answers = [sample.answer for sample in good]
    return {
        **about,
        "requests": len(samples),
        **{verdict.value: verdicts[verdict] for verdict in Verdict},
        "problems": dict(problems.most_common()),
        "duration_s": duration_s,
        **_figures(answers),
        "throughput": _throughput(answers, duration_s),
        "rounds": [
            {"round": number, **_figures([s.answer for s in good if s.round == number])}
            for number in sorted({sample.round for sample in good})
        ],
        "samples": [_sample(sample) for sample in samples],
    }


def _figures(answers: Sequence[ChatAnswer]) -> Result:
    return {
        "answers": len(answers),
        "ttft_s": summary([a.ttft_s for a in answers if a.ttft_s is not None]),
        "tpot_s": summary([a.tpot_s for a in answers if a.tpot_s is not None]),
        "prompt_tokens": summary([a.prompt_tokens for a in answers if a.prompt_tokens is not None]),
        "hit": hit_rates(answers),
    }


def hit_rates(answers: Sequence[ChatAnswer]) -> dict[str, float] | None:
    """Share of prompt tokens found in each tier, and "all"; None when no answer says."""
    telling = [a for a in answers if a.cached is not None and a.prompt_tokens]
    prompt_tokens = sum(a.prompt_tokens or 0 for a in telling)
    if not prompt_tokens:
        return None
    found: Counter[str] = Counter()
    for answer in telling:
        found.update(answer.cached or {})
    rates = {tier: found[tier] / prompt_tokens for tier in (*TIERS, ANYWHERE) if tier in found}
    return {**rates, "all": sum(rates.values())}


def _throughput(answers: Sequence[ChatAnswer], duration_s: float) -> dict[str, float | None]:
    def rate(counts: list[int | None]) -> float | None:
        known = [count for count in counts if count is not None]
        return sum(known) / duration_s if known and duration_s > 0 else None

    return {
        "input_tokens_per_s": rate([a.prompt_tokens for a in answers]),
        "output_tokens_per_s": rate([a.output_tokens for a in answers]),
        "requests_per_s": len(answers) / duration_s if duration_s > 0 else None,
    }


def _sample(sample: Sample) -> Result:
    about, answer = asdict(sample), sample.answer
    said: Result = about.pop("answer") | {"tpot_s": answer.tpot_s, "verdict": answer.verdict.value}
    for name in ("text", "prompt_ids", "output_ids"):
        del said[name]
    return about | said
