"""A small real HTTP server that answers as an OpenAI-compatible one would, or wrongly if told.

It remembers the longest prefix of characters it has seen, and reports hits in its "tiers" by what
was flushed, as Quire's server does.
"""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN_CHARS = 4
CONTEXT = 4096
PAGE = 16


def event(value: object) -> bytes:
    text = value if isinstance(value, str) else json.dumps(value)
    return f"data: {text}\n\n".encode()


def chunk(text: str | None = None, finish: str | None = None) -> dict:
    delta = {} if text is None else {"content": text}
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def usage(prompt: int, output: int, details: object = None) -> dict:
    counts = {"prompt_tokens": prompt, "completion_tokens": output}
    return {"choices": [], "usage": {**counts, "prompt_tokens_details": details}}


class Fake:
    """What the server does; tests change it."""

    def __init__(self) -> None:
        self.stream: Callable[[dict], list[bytes]] = self.answer
        self.tells_tiers = True
        self.models: list = [{"id": "fake", "max_model_len": CONTEXT}]
        self.requests: list[dict] = []
        self.keys: set[str] = set()
        self.seen: dict[str, str] = {}
        """Prompt → the tier nearest to the model that holds it."""
        self.status_code = 200
        self.content_type = "text/event-stream; charset=utf-8"
        self.busy_polls = 2
        self.flushes: list[list[str]] = []
        self.lock = threading.Lock()

    def answer(self, body: dict) -> list[bytes]:
        prompt = body.get("prompt") or "".join(m["role"] + m["content"] for m in body["messages"])
        prompt = "".join(tool["function"]["name"] for tool in body.get("tools", [])) + prompt
        num_tokens = max(1, len(prompt) // TOKEN_CHARS)
        cached = dict.fromkeys(("device", "host", "store", "peer"), 0)
        with self.lock:
            best = max(self.seen, key=lambda old: common_prefix(old, prompt), default="")
            length = common_prefix(best, prompt) // TOKEN_CHARS // PAGE * PAGE
            if length:
                cached[self.seen[best]] = min(length, num_tokens - 1)
            self.seen[prompt] = "device"
        count = body["max_tokens"]
        words = [f"w{(num_tokens + i) % 7} " for i in range(count)]
        details = {"cached_tokens": sum(cached.values()), "cached_tokens_by_tier": cached}
        if "prompt" in body:
            pieces = [{"choices": [{"index": 0, "text": word}]} for word in words]
        else:
            role = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
            if body.get("return_token_ids"):
                role["prompt_token_ids"] = ids_of(prompt)
            pieces = [role, *(chunk(word) for word in words)]
        pieces.append(chunk("", "length"))
        pieces.append(usage(num_tokens, count, details if self.tells_tiers else None))
        return [*(event(piece) for piece in pieces), event("[DONE]")]

    def flush(self, tiers: list[str]) -> None:
        self.flushes.append(tiers)
        tier = "store" if "host" in tiers else "host"
        self.seen = dict.fromkeys(self.seen, tier)


def ids_of(prompt: str) -> list[int]:
    """A token for every few characters; what is left over belongs to the last."""
    count = max(1, len(prompt) // TOKEN_CHARS)
    pieces = [prompt[i * TOKEN_CHARS :][:TOKEN_CHARS] for i in range(count)]
    return [int.from_bytes(piece.encode()[:7], "little") for piece in pieces]


def common_prefix(one: str, other: str) -> int:
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return i
    return min(len(one), len(other))


class Handler(BaseHTTPRequestHandler):
    fake: Fake

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        fake = self.fake
        if self.path == "/v1/models":
            self._json({"data": fake.models})
        elif self.path == "/admin/cache":
            busy = fake.busy_polls > 0
            fake.busy_polls -= busy
            to_come = int(busy and fake.busy_polls % 2)
            operations = {"write": int(busy) - to_come, "load": 0}
            self._json({"operations": operations, "waiting_writes": to_come})
        else:
            self._json({"error": {"message": "no such page"}}, 404)

    def do_POST(self) -> None:
        fake = self.fake
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fake.keys.add(self.headers.get("Authorization", ""))
        if self.path == "/admin/cache/flush":
            fake.flush(body["tiers"])
            self._json({})
            return
        fake.requests.append(body)
        if fake.status_code != 200:
            self._json({"error": {"message": "too busy"}}, fake.status_code)
            return
        self.send_response(200)
        self.send_header("Content-Type", fake.content_type)
        self.end_headers()
        for piece in fake.stream(body):
            self.wfile.write(piece)
            self.wfile.flush()

    def _json(self, value: object, status: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def serving(fake: Fake) -> Iterator[str]:
    """The server's URL."""
    handler = type("BoundHandler", (Handler,), {"fake": fake})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
