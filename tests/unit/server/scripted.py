"""An engine that does what a test says, and a tokenizer small enough to read.

`ScriptedEngine` has EngineClient's interface and no process behind it: it answers with a text given
beforehand, one token at a time, and can be told to wait, to fail or to be gone. The real engine is
tested with the real server in e2e/server.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import math
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import httpx
import jinja2.sandbox
import msgspec
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from quire.engine.config import EngineConfig
from quire.engine.messages import (
    CachedTokens,
    CacheWish,
    CountedTime,
    EngineInfo,
    EngineStatus,
    Finish,
    Output,
    Question,
    SamplingParams,
    StoreStatus,
    TierStatus,
    TokenLogprobs,
)
from quire.errors import EngineError
from quire.server.api import app_of
from quire.server.config import ServerConfig
from quire.server.metrics import Metrics
from quire.server.service import Service
from quire.store.account import StoreBudget, StoreHealth
from quire.text.generation_config import SamplingDefaults
from quire.text.prompting import Prompting
from quire.types import RequestId

if TYPE_CHECKING:
    from quire.web.traced import Tracer

MODEL = "tiny"
ADMIN_KEY = "root"
MAX_CONTEXT = 200
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'assistant' and loop.first %}"
    "{{ raise_exception('begin with user') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Result = TypeVar("Result")


def tiny_backend(special: Sequence[str] = (), added: Sequence[str] = ()) -> Tokenizer:
    """Byte-level: a token per byte, and a few for pairs, so that characters are cut by tokens.
    `special` and `added`: more tokens of these kinds."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("o", "Ġ"), ("Ã", "©")]
    vocab = {char: i for i, char in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t) for t in ("<|im_start|>", "<|im_end|>")])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    tokenizer.add_special_tokens([AddedToken(each) for each in special])
    tokenizer.add_tokens([AddedToken(each, normalized=False) for each in added])
    return tokenizer


class TinyTokenizer:
    """What Prompting needs of a tokenizer of transformers."""

    def __init__(
        self,
        template: str | None = TEMPLATE,
        special: Sequence[str] = (),
        added: Sequence[str] = (),
    ) -> None:
        self.backend_tokenizer = tiny_backend(special, added)
        self.chat_template = template
        self.eos_token_id = self.backend_tokenizer.token_to_id("<|im_end|>")
        self._compiled = _compiled(template or "")

    def apply_chat_template(
        self,
        conversation: Any,
        tools: Any = None,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        **options: Any,
    ) -> str:
        assert (tokenize, add_generation_prompt) == (False, True)
        return self._compiled.render(
            messages=conversation, tools=tools, add_generation_prompt=True, **options
        )


@functools.cache
def _compiled(template: str) -> jinja2.Template:
    """As transformers does it."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = raise_exception
    environment.filters["tojson"] = tojson
    return environment.from_string(template)


@dataclass(frozen=True)
class Call:
    """One generate()."""

    tokens: list[int]
    params: SamplingParams
    salt: str
    priority: int
    timeout_s: float
    prefill: tuple[str, ...] = ()
    cache: CacheWish | None = None
    num_said: int = 0
    """Tokens of its answer that there were already."""
    trace: str = ""


def status(**changes: Any) -> EngineStatus:
    fields: dict[str, Any] = {
        "tiers": [TierStatus("device", 1024, 100, 40, 10), TierStatus("host", 1024, 200, 50, 0)],
        "store": StoreStatus(
            "attached",
            "redis://:secret@host/0",
            {"read_ok": 3},
            [StoreHealth(False, StoreBudget(1 << 20, 4 << 20, is_shared=True), 250)],
        ),
        "waiting": 2,
        "running": 1,
        "waiting_tokens": 64,
        "running_tokens": 700,
        "operations": {"load": 1},
        "waiting_writes": 0,
        "ended": {"load": CountedTime(3, 0.25)},
        "leases": 4,
        "counters": {"loaded_pages": 5, "committed_pages": 7},
        "seconds": {"model": 1.5},
    }
    return EngineStatus(**fields | changes)


class ScriptedEngine:
    def __init__(
        self,
        reply: str = "hello there",
        *,
        config: EngineConfig | None = None,
        backend: Tokenizer | None = None,
        max_context: int = MAX_CONTEXT,
    ) -> None:
        self.backend = backend or tiny_backend()
        self.config = config or EngineConfig(model="/nowhere", name=MODEL, device_bytes=1 << 20)
        self.info = EngineInfo(
            name=MODEL,
            fingerprint="0123456789abcdef0123",
            device="cpu",
            dtype="float32",
            tp=1,
            page_size=16,
            vocab_size=self.backend.get_vocab_size(),
            max_context=max_context,
            tiers=[],
            store="",
        )
        self.status: EngineStatus | None = None
        self.failure: str | None = None
        self.heard_s = math.inf
        self.eos = self.backend.token_to_id("<|im_end|>")
        self.replies: Callable[[Call], Sequence[int]] = lambda call: self.backend.encode(reply).ids
        """Token ids to answer with; EOS follows by itself."""
        self.step = 1
        """Tokens per output."""
        self.hold_after: int | None = None
        """Outputs after which nothing more comes."""
        self.end: tuple[Finish, str] | None = None
        """How it ends instead, after the tokens."""
        self.cached = CachedTokens(device=16, host=8, store=4, peer=2)
        self.answers: dict[type, Any] = {}
        """By type of question: an answer, or an exception to raise."""
        self.calls: list[Call] = []
        self.questions: list[Question] = []
        self.num_aborted = 0
        self.aborted = asyncio.Event()
        self.held = asyncio.Event()
        self._live: set[int] = set()

    @property
    def num_requests(self) -> int:
        return len(self._live)

    @contextlib.asynccontextmanager
    async def generate(
        self,
        tokens: bytes,
        params: SamplingParams,
        *,
        salt: str = "",
        priority: int = 0,
        timeout_s: float = 600.0,
        prefill: Sequence[str] = (),
        cache: CacheWish | None = None,
        said: bytes = b"",
        trace: str = "",
    ) -> AsyncIterator[AsyncIterator[Output]]:
        ids = np.frombuffer(tokens, dtype="<i4").tolist()
        count = len(said) // 4
        call = Call(ids, params, salt, priority, timeout_s, tuple(prefill), cache, count, trace)
        number = len(self.calls)
        self.calls.append(call)
        self._live.add(number)
        is_finished = False

        async def outputs() -> AsyncIterator[Output]:
            nonlocal is_finished
            for i, output in enumerate(self._outputs(call)):
                if i == self.hold_after:
                    self.held.set()
                    await asyncio.Event().wait()
                await asyncio.sleep(0)
                is_finished = output.finish is not None
                yield output

        try:
            yield outputs()
        finally:
            self._live.discard(number)
            if not is_finished:
                self.num_aborted += 1
                self.aborted.set()

    async def ask(
        self, question: Question, answer: type[Result], *, timeout_s: float = 60.0
    ) -> Result:
        self.questions.append(question)
        if self.failure is not None:
            raise EngineError(self.failure)
        found = self.answers.get(type(question))
        if isinstance(found, Exception):
            raise found
        if found is None:
            raise EngineError("the script has no answer to this")
        assert isinstance(found, answer)
        return found

    def _outputs(self, call: Call) -> list[Output]:
        name = RequestId("scripted")
        if self.failure is not None:
            return [Output(name, [], finish=Finish.ERROR, error=self.failure)]
        ids = call.params.told or [*self.replies(call)]
        finish, error = self.end or (Finish.LENGTH, "")
        if self.end is None:
            if self.eos in call.params.stop_ids:
                ids.append(self.eos)
            stops = [i for i, token in enumerate(ids) if token in call.params.stop_ids]
            if stops and stops[0] < call.params.max_tokens:
                ids, finish = ids[: stops[0] + 1], Finish.STOP
            ids = ids[: call.params.max_tokens]
        ids = ids[call.num_said :]
        steps = [ids[i : i + self.step] for i in range(0, len(ids), self.step)] or [[]]
        outputs = [
            Output(
                name,
                step,
                _logprobs(step, call.params.logprobs),
                cached=self.cached if i == 0 and step else None,
            )
            for i, step in enumerate(steps)
        ]
        if self.end is not None:
            return [*outputs, Output(name, [], finish=finish, error=error)]
        last = outputs[-1]
        outputs[-1] = Output(name, last.tokens, last.logprobs, finish, error, last.cached)
        return outputs


def _logprobs(step: list[int], top: int | None) -> list[TokenLogprobs]:
    if top is None:
        return []
    return [
        TokenLogprobs(
            -0.5, [token, *range(top - 1)][:top], [-0.5, *[float("-inf")] * (top - 1)][:top]
        )
        for token in step
    ]


def of_role(role: str, reply: str = "hello there") -> ScriptedEngine:
    """An engine that says it has that role."""
    engine = ScriptedEngine(reply)
    engine.info = msgspec.structs.replace(engine.info, role=role, peer="tcp://127.0.0.1:7000")
    return engine


@dataclass
class Rig:
    """A server without sockets around a scripted engine; its client is the admin if not told
    otherwise."""

    engine: ScriptedEngine = field(default_factory=ScriptedEngine)
    config: ServerConfig = field(default_factory=lambda: ServerConfig(admin_key=ADMIN_KEY))
    tokenizer: TinyTokenizer = field(default_factory=TinyTokenizer)
    defaults: SamplingDefaults | None = None
    tracer: Tracer | None = None

    def __post_init__(self) -> None:
        self.prompting = Prompting(self.tokenizer, defaults=self.defaults)
        self.service = Service(
            self.engine, self.prompting, self.config, Metrics(), tracer=self.tracer
        )
        self.app = app_of(self.service)

    def client(self, peer: str = "127.0.0.1", **options: Any) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(app=self.app, client=(peer, 50000))
        base = options.pop("base_url", "http://localhost")
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        return httpx.AsyncClient(transport=transport, base_url=base, headers=headers, **options)

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """One request in a loop of its own."""
        peer = options.pop("peer", "127.0.0.1")

        async def send() -> httpx.Response:
            async with self.client(peer) as client:
                return await client.request(method, path, **options)

        return asyncio.run(send())

    def chat(
        self, content: str = "hi", *, headers: dict[str, str] | None = None, **fields: Any
    ) -> httpx.Response:
        messages = [{"role": "user", "content": content}]
        body = {"model": MODEL, "messages": messages} | fields
        return self.request("POST", "/v1/chat/completions", json=body, headers=headers)

    def complete(self, prompt: Any = "hi", **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "prompt": prompt} | fields
        return self.request("POST", "/v1/completions", json=body)


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error of an answer, after checking that it has OpenAI's form."""
    body = response.json()
    assert body.keys() == {"error"}, body
    error = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    return error
