"""The engine in half precision on CUDA: the rule of docs/precision.md, for every architecture that
our own decoder has and every way that a prefix can come."""

import pytest
import torch

from e2e.exactness.oracle import Answer
from e2e.exactness.rig import EngineRig, engine_rig
from e2e.exactness.scenarios import WAIT
from e2e.exactness.subjects import DENSE_SUBJECTS, PAGE, Prompt, Subject
from gpu_support import largest_gap, noise
from quire.types import Tier

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
NUM_TOKENS = 24
_CUDA = {"device": "cuda", "max_running": 8}
GRAPHS = {s.name: s.under(**_CUDA, dtype="bfloat16") for s in DENSE_SUBJECTS}
EAGER = {s.name: s.under(**_CUDA, dtype="bfloat16", cuda_graphs=False) for s in DENSE_SUBJECTS}
HALF = GRAPHS["dense_llama"].under(**_CUDA, dtype="float16")


def name_of(subject: Subject) -> str:
    options = dict(subject.options)
    return f"{subject}-{options['dtype']}-{'eager' if 'cuda_graphs' in options else 'graphs'}"


class Rule:
    """For one subject: no gap larger than twice the noise."""

    def __init__(self, subject: Subject, prompts: list[Prompt]) -> None:
        self._subject = subject
        self._prompts = prompts

    def ask(self, rig: EngineRig, what: str, *, stagger: int = 0) -> None:
        self.check(rig.answer(self._prompts, NUM_TOKENS, stagger=stagger), what)

    def check(self, answers: list[Answer], what: str) -> None:
        directory, dtype = self._subject.find(), dict(self._subject.options)["dtype"]
        tokens = [answer.tokens for answer in answers]
        allowed = 2 * noise(directory, self._prompts, tokens, dtype)
        gap = largest_gap(directory, self._prompts, tokens)
        print(f"{self._subject}, {what}: gap {gap:.2e} of {allowed:.2e}")
        assert gap < allowed, f"{what}: gap {gap:.2e} of {allowed:.2e}"


@pytest.mark.parametrize(
    "subject",
    [*GRAPHS.values(), HALF, EAGER["dense_llama"], EAGER["dense_gemma3"]],
    ids=name_of,
)
def test_every_tier_keeps_the_rule_c32(subject, tmp_path):
    rule = Rule(subject, subject.ask())
    with engine_rig(subject, store=f"file://{tmp_path}/store?max=1GiB", **WAIT) as rig:
        rule.ask(rig, "cold, in mixed batches", stagger=3)
        rule.ask(rig, "device")
        rig.flush(Tier.DEVICE)
        rule.ask(rig, "host")
        assert rig.reused("host") > 0
        rig.flush(Tier.DEVICE, Tier.HOST)
        rule.ask(rig, "store")
        assert rig.reused("store") > 0


@pytest.mark.parametrize(
    "subject",
    [GRAPHS["dense_qwen3"], GRAPHS["dense_gemma3"], EAGER["dense_mistral"]],
    ids=name_of,
)
def test_eviction_and_preemption_keep_the_rule_c32(subject):
    prompts = subject.two()
    rule = Rule(subject, prompts)
    pages = sum(len(prompt) // PAGE + 1 for prompt in prompts)
    with engine_rig(subject, device_pages=pages, host_pages=4 * pages, chunk_tokens=64) as rig:
        for turn in range(2):
            rule.ask(rig, f"short of pages, turn {turn}", stagger=turn)
        assert rig.counter("requests_preempted") > 0
        assert rig.counter("evicted_device_pages") > 0


def test_wrong_pages_break_the_rule():
    """A negative control: the heads of the cached pages are swapped."""
    subject = GRAPHS["dense_llama"]
    rule = Rule(subject, subject.two())
    with engine_rig(subject, host_pages=0) as rig:
        rule.ask(rig, "cold")
        pool = rig.engine._executor._rank.worker.components["full"].device
        for layer in range(pool.layout.num_layers):
            for plane in pool.planes(layer):
                plane.copy_(plane.flip(2))
        answers = rig.answer(subject.two(), NUM_TOKENS)
        assert rig.reused("device") > 0
    with pytest.raises(AssertionError, match="gap"):
        rule.check(answers, "swapped")
