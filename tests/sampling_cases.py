"""Drawing on the device against drawing on the host: on CUDA, and in Triton's interpreter on a CPU.

The interpreter takes a tenth of a second per row, so sizes come with the place.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from quire.engine.messages import SamplingParams
from quire.engine.sampling import Row, Sampler, needs_history, sample
from quire.types import RequestId


@dataclass(frozen=True)
class Place:
    device: str
    vocab_size: int
    block: int
    """Tokens that a program looks at together."""
    dtype: torch.dtype = torch.float32

    def sampler(self, max_rows: int) -> Sampler:
        from quire.engine.sampling.on_device import DeviceSampler

        return DeviceSampler(torch.device(self.device), self.vocab_size, max_rows, block=self.block)

    def check(self, logits: torch.Tensor, rows: list[Row]) -> None:
        """The host draws the same."""
        logits = logits.to(self.dtype)
        ids = [RequestId(str(i)) for i in range(len(rows))]
        drawn = self.sampler(len(rows)).draw(logits.to(self.device), rows, ids)
        there, here = drawn.collect(), sample(logits, rows)
        assert [s.error for s in there] == [s.error for s in here]
        assert [s.token for s in there] == [s.token for s in here]
        tokens = drawn.tokens.tolist()
        assert all(0 <= token < self.vocab_size for token in tokens)
        fine = [i for i, s in enumerate(here) if not s.error]
        assert [tokens[i] for i in fine] == [here[i].token for i in fine]
        for one, other in zip(there, here, strict=True):
            assert (one.logprobs is None) == (other.logprobs is None)
            if one.logprobs is not None and other.logprobs is not None:
                assert one.logprobs.top_ids == other.logprobs.top_ids
                found = [one.logprobs.logprob, *one.logprobs.top_logprobs]
                expected = [other.logprobs.logprob, *other.logprobs.top_logprobs]
                assert found == pytest.approx(expected, abs=1e-9)


def pack(tokens: Any) -> bytes:
    return np.array(tokens, "<i4").tobytes()


def random_params(rng: np.random.Generator, **fixed: Any) -> SamplingParams:
    chosen: dict[str, Any] = {
        "max_tokens": 1,
        "temperature": float(rng.choice([0.0, 0.05, 0.7, 1.0, 2.5])),
        "top_k": int(rng.choice([0, 0, 1, 7, 50, 100_000_000])),
        "top_p": float(rng.choice([1.0, 1.0, 0.0, 0.3, 0.9, 0.999])),
        "min_p": float(rng.choice([0.0, 0.0, 0.02, 0.5, 1.0])),
        "seed": int(rng.integers(1 << 62)),
        "logprobs": int(rng.integers(0, 6)) if rng.random() < 0.3 else None,
    }
    return SamplingParams(**(chosen | fixed))


def random_edits(rng: np.random.Generator, vocab_size: int) -> dict[str, Any]:
    tokens = rng.integers(-2, vocab_size + 2, rng.integers(0, 90)).tolist()
    return {
        "repetition_penalty": float(rng.choice([1.0, 0.8, 1.3])),
        "presence_penalty": float(rng.choice([0.0, -0.5, 1.1])),
        "frequency_penalty": float(rng.choice([0.0, 0.3, 0.7])),
        "logit_bias": {t: float(rng.choice([-100.0, -1.0, 2.5, -math.inf])) for t in tokens},
    }


KINDS = ["flat", "broad", "peaked", "equals", "masked", "outlier", "shifted"]


def random_logits(rng: np.random.Generator, kind: str, vocab_size: int) -> torch.Tensor:
    values = rng.normal(0, {"flat": 0.02, "peaked": 9.0}.get(kind, 1.5), vocab_size)
    if kind == "equals":
        values = np.round(values)
    elif kind == "masked":
        values[rng.random(vocab_size) < 0.9] = -math.inf
    elif kind == "outlier":
        values[rng.integers(vocab_size)] = -1e30
        values[rng.integers(vocab_size)] += 4
    elif kind == "shifted":
        values -= 300
    return torch.from_numpy(values.astype(np.float32))


def check_random_rows(place: Place, kind: str, num_rows: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.stack([random_logits(rng, kind, place.vocab_size) for _ in range(num_rows)])
    rows = []
    for _ in range(num_rows):
        edits = random_edits(rng, place.vocab_size) if rng.random() < 0.4 else {}
        prompt, output = (rng.integers(-1, place.vocab_size + 1, 30) for _ in range(2))
        rows.append(Row(random_params(rng, **edits), 30, pack(prompt), pack(output)))
    place.check(logits, rows)


def check_held_rows(place: Place, num_rows: int, seed: int) -> None:
    """Some may draw anything, some what a grammar allows: few tokens, most, one, none."""
    rng = np.random.default_rng(seed)
    size = place.vocab_size
    logits = torch.stack([random_logits(rng, "broad", size) for _ in range(num_rows)])
    rows = []
    for i in range(num_rows):
        share = [None, 0.01, 0.9, 1 / size, 0.0][i % 5]
        edits = random_edits(rng, size) if rng.random() < 0.4 else {}
        may = np.zeros(size, bool) if share is None else rng.random(size) < share
        may[size // 2] |= share != 0.0
        mask = b"" if share is None else np.packbits(may, bitorder="little").tobytes()
        rows.append(Row(random_params(rng, **edits), i, pack([]), pack(range(i)), mask))
    place.check(logits, rows)
    for row, sampled in zip(rows, sample(logits.to(place.dtype), rows), strict=True):
        if row.allowed:
            may = np.unpackbits(np.frombuffer(row.allowed, np.uint8), bitorder="little")
            assert sampled.error if not may.any() else may[sampled.token]


def check_tails_without_weight(place: Place) -> None:
    """Filters that keep everything end before tokens that weigh nothing."""
    rng = np.random.default_rng(0)
    logits = torch.stack([random_logits(rng, "outlier", place.vocab_size)] * 4)
    size = place.vocab_size
    filters = [{"top_k": size - 1}, {"top_k": size}, {"top_k": 10 * size}, {"top_p": 1 - 2.0**-53}]
    base = {"max_tokens": 1, "temperature": 2.5, "min_p": 0.02}
    place.check(logits, [Row(SamplingParams(**base, **f), i) for i, f in enumerate(filters)])


def check_greedy(place: Place, kind: str, num_rows: int) -> None:
    """A batch of nothing else goes a shorter way."""
    rng = np.random.default_rng(0)
    logits = torch.stack([random_logits(rng, kind, place.vocab_size) for _ in range(num_rows)])
    logits[0] = 1.0
    place.check(logits, [Row(random_params(rng, temperature=0.0), i) for i in range(num_rows)])


def check_many_logprobs(place: Place) -> None:
    """More than there usually are, of the whole vocabulary, of equals."""
    rng = np.random.default_rng(0)
    logits = torch.stack([random_logits(rng, "equals", place.vocab_size) for _ in range(4)])
    logits[1, 3:] = -math.inf
    counts = [place.vocab_size + 1, 5, 40, 0] if place.vocab_size < 1000 else [50, 5, 20, 0]
    params = [random_params(rng, logprobs=count) for count in counts]
    place.check(logits, [Row(p, i) for i, p in enumerate(params)])


def check_extremes(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token has the interval from its lower end on; weights of 0 are never drawn."""
    from quire.engine.sampling import on_device, on_host

    size = place.vocab_size
    spread = torch.full((size,), -math.inf)
    spread[[1, size // 2, size - 1, 3]] = 2.0
    rows = [Row(SamplingParams(max_tokens=1), 0), Row(SamplingParams(max_tokens=1, top_k=3), 0)]
    for u in (0.0, 0.25, 0.5, 0.75, 1 - 2.0**-53):
        for module in (on_device, on_host):
            monkeypatch.setattr(module, "uniform", lambda seed, position, u=u: u)
        place.check(torch.stack([spread, torch.zeros(size)]), rows)


def check_strange_rows(place: Place) -> None:
    rng = np.random.default_rng(0)
    logits = torch.stack([random_logits(rng, "broad", place.vocab_size) for _ in range(6)])
    logits[1, 5] = math.nan
    logits[2, 6] = math.inf
    logits[3, :] = -math.inf
    logits[4, :] = -math.inf
    logits[4, 7] = -2e38
    for greedy in (False, True):
        params = random_params(rng, temperature=0.0 if greedy else 1.0, logprobs=2)
        place.check(logits, [Row(params, i) for i in range(6)])
    banned = random_params(rng, logit_bias=dict.fromkeys(range(place.vocab_size), -math.inf))
    place.check(logits[:1], [Row(banned, 0)])


# ---- histories over many steps -------------------------------------------------------------------


@dataclass
class _Client:
    id: RequestId
    params: SamplingParams
    prompt: list[int]
    output: list[int] = field(default_factory=list)

    def row(self, *, late: bool) -> Row:
        """`late`: its last token has not come back from the device."""
        if not needs_history(self.params):
            return Row(self.params, len(self.output))
        known = self.output[:-1] if late else self.output
        return Row(self.params, len(self.output), pack(self.prompt), pack(known))


def check_histories(place: Place, num_steps: int, max_rows: int, seed: int) -> None:
    """Requests come and go, pause, lose their last token, and outnumber the slots."""
    rng = np.random.default_rng(seed)
    sampler = place.sampler(max_rows)
    clients: list[_Client] = []
    before: list[_Client] = []
    started = 0
    for _ in range(num_steps):
        while len(clients) < 2 * max_rows:
            edits = random_edits(rng, place.vocab_size) if rng.random() < 0.8 else {}
            temperature = float(rng.choice([0.0, 0.0, 1.0]))
            params = random_params(
                rng, temperature=temperature, top_k=0, top_p=1.0, min_p=0.0, logprobs=None, **edits
            )
            prompt = rng.integers(0, place.vocab_size, rng.integers(1, 40)).tolist()
            clients.append(_Client(RequestId(f"r{started}"), params, prompt))
            started += 1
        resting = [c for c in clients if c not in before]
        batch = [c for c in before if rng.random() < 0.8]
        batch += [c for c in resting if rng.random() < 0.3]
        batch = batch[:max_rows]
        for client in batch:
            if client in before and client.output and rng.random() < 0.1:
                client.output.pop()  # that batch failed for it: it is drawn for again
                before.remove(client)
        rng.shuffle(batch)
        if batch:
            logits = torch.stack([random_logits(rng, "equals", place.vocab_size) for _ in batch])
            logits = logits.to(place.dtype)
            late = [c.row(late=bool(c in before and rng.random() < 0.7)) for c in batch]
            drawn = sampler.draw(logits.to(place.device), late, [c.id for c in batch])
            expected = sample(logits, [c.row(late=False) for c in batch])
            assert [s.token for s in drawn.collect()] == [s.token for s in expected]
            for client, sampled in zip(batch, expected, strict=True):
                client.output.append(sampled.token)
        before = batch
        ended = [c for c in clients if rng.random() < 0.1]
        clients = [c for c in clients if c not in ended]
        before = [c for c in before if c not in ended]


def check_late_restart(place: Place) -> None:
    """Its slot is gone, and its last token is only in the draw before."""
    rng = np.random.default_rng(0)
    sampler = place.sampler(2)
    other = Row(SamplingParams(max_tokens=1, temperature=0.0), 0)
    params = random_params(rng, temperature=0.0, frequency_penalty=9.0, repetition_penalty=1.5)
    client = _Client(RequestId("r"), params, [1, 2], [3])
    logits = random_logits(rng, "broad", place.vocab_size).expand(2, -1).to(place.dtype)
    for late in (False, True, True):
        rows = [other, client.row(late=late)]
        drawn = sampler.draw(logits.to(place.device), rows, [RequestId("other"), client.id])
        expected = sample(logits, [other, client.row(late=False)])
        assert drawn.collect() == expected
        client.output.append(expected[1].token)
        sampler._slots.drop(client.id)  # as if others had needed it
    assert len(set(client.output)) == 4


def check_reused_id(place: Place) -> None:
    """Another request of the same name has biases of its own."""
    sampler, logits = place.sampler(1), torch.zeros(1, place.vocab_size, dtype=place.dtype)
    for token in (3, 5):
        params = SamplingParams(max_tokens=1, temperature=0.0, logit_bias={token: 2.0})
        for position in range(2):
            drawn = sampler.draw(logits.to(place.device), [Row(params, position)], [RequestId("r")])
            assert drawn.collect()[0].token == token
