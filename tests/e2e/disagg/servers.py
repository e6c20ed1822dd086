"""Real servers with roles, in processes of their own: started together, talked to as clients do.

    Node     one `quire serve`, with what can be asked of it
    Program  any other long-lived command: `quire route`, `quire pd`

Answers are compared token by token with stock transformers (`check`). Tiny models, which have no
tokenizer, are given one whose texts are the tokens' numbers: t003t017t200.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import httpx
import psutil
from tokenizers import Tokenizer, models, pre_tokenizers

from e2e.disagg.transports import CHOSEN
from e2e.exactness.oracle import NOISE, reference
from e2e.exactness.subjects import PAGE, Prompt, Subject
from e2e.serving.server import Server, wait_until
from hybrid_models import VOCABULARY
from quire.text.vocabulary import Vocabulary
from quire.web.routes import RouterNote, router_key, signed

SECRET = "a secret of these tests"
TIMEOUT_S = 300.0
"""For an answer: so that a broken test ends."""
START_TIMEOUT_S = 300.0
MODEL = "tested"
"""What every model is called."""
_READY = re.compile(r"ready at (http://\S+)|base_url=(http://\S+)/v1")

Where = Callable[[], contextlib.AbstractContextManager[object]]
"""From where things are done: a network, for the links' tests."""


# ---- models --------------------------------------------------------------------------------------


@cache
def model_of(subject: Subject) -> Path:
    """Its directory, with a tokenizer in any case, under one name for all."""
    return Path(_folder(subject).name) / MODEL


@cache
def _folder(subject: Subject) -> tempfile.TemporaryDirectory[str]:
    """Removed when the process ends."""
    folder = tempfile.TemporaryDirectory(prefix=f"quire-{subject}-")
    path = Path(folder.name) / MODEL
    if not subject.is_quick:
        path.symlink_to(subject.find())
        return folder
    shutil.copytree(subject.find(), path)
    tokenizer = Tokenizer(models.WordLevel({_name(i): i for i in range(VOCABULARY)}, _name(0)))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": _name(2),
        "chat_template": "{% for m in messages %}{{ m['content'] }} {% endfor %}",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def _name(token: int) -> str:
    return f"t{token:03}"  # none is a part of another


def words(prompt: Prompt) -> str:
    """A tiny model's prompt as text."""
    return " ".join(map(_name, prompt))


@cache
def _vocabulary(subject: Subject) -> Vocabulary:
    return Vocabulary(Tokenizer.from_file(str(model_of(subject) / "tokenizer.json")))


def pages_of(num_tokens: int) -> int:
    """Of a prompt's pages, those that are handed over: the last token is always computed."""
    return (num_tokens - 1) // PAGE


# ---- answers -------------------------------------------------------------------------------------


@dataclass
class Reply:
    status: int
    error: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    names: list[str] = field(default_factory=list)
    """Of the tokens."""
    logprobs: list[float] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    """If they were asked for."""
    by_choice: dict[int, list[int]] = field(default_factory=dict)
    """The same, of each choice."""
    usage: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def message(self) -> str:
        return str(self.error.get("message", ""))

    @property
    def cached(self) -> dict[str, int]:
        """By this server's tiers; those with something."""
        tiers = self.usage["prompt_tokens_details"]["cached_tokens_by_tier"]
        return {name: count for name, count in tiers.items() if count}

    @property
    def at_prefill(self) -> dict[str, int]:
        tiers = self.usage["prompt_tokens_details"]["cached_tokens_at_prefill"]
        return {name: count for name, count in tiers.items() if count}

    @property
    def total(self) -> int:
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])

    def take_in(self, body: dict[str, Any]) -> None:
        """A whole answer, or a piece of a stream."""
        self.error = body.get("error") or self.error
        self.usage = body.get("usage") or self.usage
        for choice in body.get("choices", ()):
            self.text += choice["text"]
            ids = choice.get("token_ids") or []
            self.ids += ids
            self.by_choice.setdefault(choice["index"], []).extend(ids)
            scored = choice["logprobs"] or {"tokens": [], "token_logprobs": []}
            self.names += scored["tokens"]
            self.logprobs += scored["token_logprobs"]


def question(prompt: Prompt, num_tokens: int, **options: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "logprobs": 1,
        "ignore_eos": True,
    } | options


def complete(
    client: httpx.Client, prompt: Prompt, num_tokens: int, *, prefill: Sequence[str] = ()
) -> Reply:
    """Greedy."""
    response = client.post(
        "/v1/completions", json=question(prompt, num_tokens), headers=_headers(client, prefill)
    )
    reply = Reply(response.status_code, seconds=response.elapsed.total_seconds())
    reply.take_in(response.json())
    return reply


def stream(
    client: httpx.Client,
    prompt: Prompt,
    num_tokens: int,
    *,
    prefill: Sequence[str] = (),
    on_piece: Callable[[Reply], None] = lambda _: None,
    **options: Any,
) -> Reply:
    """The same in pieces. `on_piece` is called after each, with all there is so far."""
    body = question(
        prompt, num_tokens, stream=True, stream_options={"include_usage": True}, **options
    )
    with client.stream(
        "POST", "/v1/completions", json=body, headers=_headers(client, prefill)
    ) as response:
        reply = Reply(response.status_code)
        if response.status_code != 200:
            reply.take_in(json.loads(response.read()))
            return reply
        ended = False
        for line in response.iter_lines():
            if line == "data: [DONE]":
                ended = True
            elif line.startswith("data: "):
                reply.take_in(json.loads(line.removeprefix("data: ")))
                on_piece(reply)
    assert ended or reply.error, "the stream just ended"
    return reply


def _headers(http: httpx.Client, prefill: Sequence[str]) -> dict[str, str]:
    """As a router says it that knows the admin key."""
    if not prefill:
        return {}
    key = router_key(http.headers["authorization"].removeprefix("Bearer "))
    return signed(RouterNote(",".join(prefill)), key, time.time())


def check(subject: Subject, prompt: Prompt, reply: Reply) -> list[int]:
    """Raises unless it is what stock transformers answers, likelihoods too. Returns the tokens;
    none, where two were as close as the last digits of a sum and the other one won."""
    assert reply.status == 200, reply
    assert not reply.error, reply
    expected = reference(subject, prompt, len(reply.names))
    assert expected.tokens
    label = _vocabulary(subject).label
    for step, (name, said) in enumerate(zip(reply.names, reply.logprobs, strict=True)):
        logits, token = expected.logits[step], expected.tokens[step]
        best = logits.topk(2).values
        if name != label(token):
            gap = float(best[0] - best[1])
            assert gap < NOISE, f"token {step} is {name!r}, should be {label(token)!r}: {gap:.1e}"
            print(f"token {step} differs, logit gap {gap:.1e}")
            return []
        wrong = abs(float(logits.log_softmax(-1)[token]) - said)
        assert wrong < NOISE, f"token {step} is said to be {wrong:.1e} likelier than it is"
    return expected.tokens


def check_ids(subject: Subject, prompt: Prompt, ids: Sequence[int]) -> None:
    """The same for an answer of which only the tokens are known."""
    expected = reference(subject, prompt, len(ids))
    for step, (said, token) in enumerate(zip(ids, expected.tokens, strict=True)):
        if said != token:
            best = expected.logits[step].topk(2).values
            gap = float(best[0] - best[1])
            assert gap < NOISE, f"token {step} is {said}, should be {token}: {gap:.1e}"
            return


# ---- servers -------------------------------------------------------------------------------------


class Node(Server):
    """A `quire serve`; `with` waits until it is ready."""

    def __init__(
        self,
        folder: Path,
        subject: Subject,
        *,
        where: Where = contextlib.nullcontext,
        **options: object,
    ) -> None:
        self.subject = subject
        self._where = where
        self._options = options
        self._folder = folder
        self._lives = 0
        self._http: httpx.Client | None = None
        self._start()

    def _start(self, **more: object) -> None:
        self._lives += 1
        memory = {"device_memory": "8MiB", "host_memory": "16MiB"}
        given = {"model": model_of(self.subject), "peer_secret": SECRET, "page_size": PAGE}
        with self._where():
            super().__init__(
                self._folder / f"life-{self._lives}", **memory | given | self._options | more
            )

    def __enter__(self) -> Self:
        super().__enter__()
        self._http = self.client()
        self.info = self.get("/admin/info")
        self.peer: str = self.info["peer"]
        return self

    def __exit__(self, *_: object) -> None:
        if self._http is not None:
            self._http.close()
            self._http = None
        super().__exit__()

    @property
    def admin_headers(self) -> dict[str, str]:
        """With the key that it was given, or has made."""
        key = self._options.get("admin_key")
        return {"authorization": f"Bearer {key}"} if key else super().admin_headers

    def start_again(self) -> None:
        """After its death, at the same address. Enter it again to wait until it is ready."""
        port = urlsplit(self.url).port
        self.__exit__()
        self._start(port=port)

    def stop_engine(self) -> None:
        """It stands still: its sockets stay open, and nothing comes out of them."""
        self.engine.suspend()

    def resume_engine(self) -> None:
        self.engine.resume()

    # ---- what a client asks

    def ask(self, prompt: Prompt, num_tokens: int = 0, *, prefill: Sequence[str] = ()) -> Reply:
        assert self._http is not None
        num_tokens = num_tokens or self.subject.num_tokens
        with self._where():
            return complete(self._http, prompt, num_tokens, prefill=prefill)

    def client(self) -> httpx.Client:
        """Of an administrator, who may also say where a prompt is computed."""
        return httpx.Client(base_url=self.url, timeout=TIMEOUT_S, headers=self.admin_headers)

    # ---- what an administrator asks

    def get(self, path: str) -> dict[str, Any]:
        assert self._http is not None
        with self._where():
            response = self._http.get(path)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    def requests(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get("/admin/requests")["requests"]
        return found

    def handover(self) -> dict[str, Any]:
        found: dict[str, Any] = self.get("/admin/cache")["handover"]
        return found

    def page_bytes(self) -> dict[str, int]:
        return {t["component"]: t["page_bytes"] for t in self.get("/admin/cache")["tiers"]}

    def flush(self, *tiers: str, at_once: bool = False) -> None:
        """Once nothing is in flight, since what is being copied stays; or else at once."""
        if not at_once:
            self.wait_clean()
        assert self._http is not None
        with self._where():
            response = self._http.post("/admin/cache/flush", json={"tiers": tiers})
        assert response.status_code == 200, response.text

    def unclean(self) -> list[str]:
        """What is not given back yet."""
        status = self.get("/admin/cache")
        about = {
            "requests": self.requests(),
            "leases": status["leases"],
            "operations": {kind: n for kind, n in status["operations"].items() if n},
            "writes to come": status["waiting_writes"],
            "hand-overs": (status["handover"] or {}).get("open"),
            "locked pages": sum(tier["locked_pages"] for tier in status["tiers"]),
        }
        return [f"{name}: {value}" for name, value in about.items() if value]

    def wait_clean(self) -> None:
        """Every page, lease and request is back, and every invariant holds."""
        wait_until(lambda: not self.unclean(), f"all is given back: {self.unclean()}")
        assert self.get("/admin/cache?check=true")["checked"]


def post(url: str, prompt: Prompt, num_tokens: int, **options: Any) -> http.client.HTTPConnection:
    """A connection on which a request was sent, and nothing is awaited."""
    where = urlsplit(url)
    connection = http.client.HTTPConnection(str(where.hostname), where.port, timeout=TIMEOUT_S)
    body = json.dumps(question(prompt, num_tokens, **options))
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    return connection


@contextlib.contextmanager
def running(*nodes: Node) -> Iterator[None]:
    """Those that start at the same time: until all are ready."""
    with contextlib.ExitStack() as stack:
        for node in nodes:
            stack.callback(node.__exit__)
        for node in nodes:
            node.__enter__()
        yield


class Program:
    """`quire …`, which says where it is once it is ready. Starts at once."""

    def __init__(self, folder: Path, *arguments: str, **options: object) -> None:
        folder.mkdir(parents=True)
        self._log = folder / "log"
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("QUIRE_") or name == "QUIRE_CACHE_DIR"
        }
        options = {"peer_transport": CHOSEN.value} | options
        ours = {f"QUIRE_{name.upper()}": str(value) for name, value in options.items()}
        with self._log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "quire.cli", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=inherited | ours | {"COLUMNS": "200"},
                start_new_session=True,
            )
        self.url = ""

    def __enter__(self) -> Self:
        try:
            wait_until(self._is_ready, "it is ready", START_TIMEOUT_S)
            assert self.url, f"it ended before it was ready:\n{self.log}"
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        family = []
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.process.pid)
            family = [process, *process.children(recursive=True)]
        for each in family:
            with contextlib.suppress(psutil.Error):
                each.kill()
        self.process.wait()

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def descendants(self) -> list[psutil.Process]:
        found: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
        return found

    def press_ctrl_c(self) -> int:
        """As a terminal does. Returns its exit code."""
        os.killpg(self.process.pid, signal.SIGINT)
        return self.process.wait(TIMEOUT_S)

    def _is_ready(self) -> bool:
        found = _READY.search(self.log)
        if found:
            self.url = found[1] or found[2]
        return found is not None or self.process.poll() is not None
