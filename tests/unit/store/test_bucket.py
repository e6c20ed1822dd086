"""A bucket: what cannot be opened says why, and what others keep there stays. On a test double."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.request import Request, urlopen

import pytest

from quire.errors import StoreError, StoreURLError
from quire.store.base import HEADER_BYTES, Blob, NewObject, ObjectName
from quire.store.codec import object_name
from quire.store.url import open_store, parse_url
from quire.types import PageKey, PageStatus
from store_servers import Link
from unit.store.conftest import counted

MIB = 1 << 20
OK, MISS = PageStatus.OK, PageStatus.MISS


pytest.importorskip("obstore", reason="needs the packages of the s3 extra")
import obstore  # noqa: E402

from quire.store.bucket import BucketStore, bucket_of  # noqa: E402


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cret")


@pytest.fixture
def bucket(moto):
    moto.empty()
    return moto


def raw(bucket):
    """As somebody else sees it."""
    from obstore.store import from_url

    options = {"allow_http": True}
    where = f"s3://{bucket.bucket}"
    return from_url(where, endpoint=bucket.endpoint, region="us-east-1", client_options=options)


def send(bucket, path: str, data: bytes) -> None:
    raw(bucket).put(path, data)


def path_of(pages, n: int) -> str:
    name = object_name(pages.part, pages.key(n))
    return f"cache/objects/{name.key[:1].hex()}/{name.text}"


def test_pages_come_back_for_another_engine(bucket, client, pages):
    assert pages.put_path(client(open_store(bucket.url)), 1, 2, 3) == [OK] * 3
    other = client(open_store(bucket.url))
    assert pages.usable(other, 1, 2, 3, 4) == 3
    assert pages.get(other, 1, 2, 3, 4) == [OK, OK, OK, MISS]


@pytest.mark.parametrize("data", [b"", b"x" * HEADER_BYTES, b"x" * (1 << 20)])
def test_an_object_that_is_no_page_is_a_miss_and_the_next_is_right_c17(bucket, client, pages, data):
    cache = client(open_store(bucket.url))
    pages.put_path(cache, 1, 2)
    send(bucket, path_of(pages, 1), data)
    assert pages.get(cache, 1, 2)[0] in (PageStatus.CORRUPT, MISS)
    assert pages.get(cache, 1, 2) == [MISS, OK]


def test_a_damaged_page_is_set_aside_and_written_again_c17(bucket, client, pages):
    cache = client(open_store(bucket.url))
    pages.put_path(cache, 1)
    send(bucket, path_of(pages, 1), b"x" * pages.object_bytes)
    assert pages.get(cache, 1) != [OK]
    assert pages.put_path(cache, 1) == [OK]
    assert pages.get(cache, 1) == [OK]


def test_what_others_keep_there_is_left_alone(bucket, client, pages):
    cache = client(open_store(bucket.url))
    foreign = ("else", "cache/else", "cache/objects/00/else", path_of(pages, 9).replace("09", "x"))
    for path in foreign:
        send(bucket, path, b"theirs")
    pages.put_path(cache, 1, 2)
    assert len(list(cache._store.scan())) == 2
    assert cache._store.clear() == 2
    for path in foreign:
        assert bytes(raw(bucket).get(path).bytes()) == b"theirs"


def test_writing_into_a_bucket_that_is_gone_fails_and_is_given_up_for_a_while(
    bucket, client, pages
):
    """Somebody has deleted it: nothing is kept, and that is to be seen."""
    cache = client(open_store(bucket.url))
    pages.put(cache, 1)
    urlopen(Request(f"{bucket.endpoint}/moto-api/reset", method="POST")).close()
    assert pages.get(cache, 1) == [MISS]
    for n in range(10, 15):
        assert pages.put(cache, n) == [PageStatus.FAILED]
    assert not cache.health()[0].answers


def test_a_bucket_that_does_not_answer_is_left_at_the_deadline(bucket, client, pages):
    cache = client(open_store(bucket.url))
    pages.put(cache, 1)
    bucket.pause()
    try:
        statuses = pages.get(cache, 1, deadline=time.monotonic() + 0.3)
    finally:
        bucket.go_on()
    assert statuses == [PageStatus.TIMEOUT]
    assert pages.get(cache, 1) == [OK]


@pytest.fixture
def questions(monkeypatch):
    """Every object that the server is asked about."""
    asked, ask = [], obstore.head_async

    def head_async(bucket, path):
        asked.append(path)
        return ask(bucket, path)

    monkeypatch.setattr(obstore, "head_async", head_async)
    return asked


def test_what_follows_a_page_that_was_just_made_here_is_written_unasked(
    bucket, client, pages, questions
):
    cache = client(open_store(bucket.url))
    pages.put_path(cache, 1, 2)
    questions.clear()
    assert pages.put_path(cache, 3, 4, after=2) == [OK] * 2
    assert questions == []
    other = client(open_store(bucket.url))  # which knows nothing of it
    questions.clear()
    assert pages.put_path(other, 3, 4, after=2) == [OK] * 2
    assert questions == [
        f"objects/{path_of(pages, n).partition('/objects/')[2]}" for n in (3, 2, 4)
    ]
    questions.clear()
    assert pages.put_path(other, 5, after=4) == [OK]  # it was there: others write here too
    assert len(questions) == 2


@pytest.mark.parametrize("how", ["taken out", "cleared", "found to be gone"])
def test_a_page_that_is_gone_is_not_taken_for_one_that_was_just_made(bucket, client, pages, how):
    cache = client(open_store(bucket.url))
    pages.put_path(cache, 1, 2)
    name = object_name(pages.part, pages.key(2))
    assert cache._store.has_made(name)
    if how == "taken out":
        cache._store.quarantine(name)
    elif how == "cleared":
        cache._store.clear()
    else:
        open_store(bucket.url).clear()
        assert pages.usable(cache, 1, 2) == 0
    assert pages.put_path(cache, 3, after=2) == [PageStatus.ORPHAN]
    assert pages.there(cache, 3) == []


class Gathering(ThreadingHTTPServer):
    """Answers nobody before so many have asked."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, number: int) -> None:
        self.all_here = threading.Barrier(max(1, number), timeout=60)
        super().__init__(("127.0.0.1", 0), Asked)

    def change(self) -> None:
        """Asked to, and refuses."""

    def keep(self, request: BaseHTTPRequestHandler) -> None:
        self.change()
        request.send_response(403)
        request.send_header("Content-Length", "0")
        request.end_headers()

    def look(self, request: BaseHTTPRequestHandler) -> None:
        self.all_here.wait()
        request.send_response(404)
        request.send_header("Content-Length", "0")
        request.end_headers()


class Asked(BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.server.look(self)

    def do_GET(self):
        self.server.answer(self)

    def do_PUT(self):
        self.server.keep(self)

    def log_message(self, *_):
        """Quietly."""


@contextmanager
def served(server: Gathering) -> Iterator[BucketStore]:
    """A store in a bucket that is that server."""
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    url = f"s3://bucket?endpoint=http://127.0.0.1:{server.server_port}&region=us-east-1"
    store = BucketStore(bucket_of(parse_url(url)))
    try:
        yield store
    finally:
        store.close()
        server.shutdown()
        serving.join()
        server.server_close()


def test_all_keys_of_a_probe_are_asked_for_at_once(pages):
    """256 questions take as long as one: each is answered only when all of them have come."""
    names = [object_name(pages.part, pages.key(n)) for n in range(256)]
    with served(Gathering(256)) as store:
        assert store.contains(names, deadline=time.monotonic() + 120) == [False] * 256


class Ranges(Gathering):
    """A bucket with one object. It sends ranges of it when all but the first, by which one sees how
    large it is, have been asked for; the one at `broken` it does not send."""

    def __init__(self, data: bytes, number: int, broken: int | None = None) -> None:
        super().__init__(number)
        self.data, self.broken = data, broken
        self.asked: list[tuple[int, int]] = []

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        named = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("Range", ""))
        assert named is not None, "all of a large object was asked for at once"
        begin, end = int(named[1]), min(int(named[2]) + 1, len(self.data))
        self.asked.append((begin, end))
        if begin:
            self.all_here.wait()
        is_broken = begin == self.broken
        request.send_response(400 if is_broken else 206)
        request.send_header("ETag", '"1"')
        request.send_header("Last-Modified", "Tue, 17 Nov 2026 10:00:00 GMT")
        request.send_header("Content-Length", "0" if is_broken else str(end - begin))
        request.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(self.data)}")
        request.end_headers()
        if not is_broken:
            request.wfile.write(self.data[begin:end])


@pytest.mark.parametrize(
    ("size", "broken", "status"),
    [
        (20 * MIB, None, OK),
        (17 * MIB, None, PageStatus.CORRUPT),  # it may be a packed page
        (3 * MIB, None, PageStatus.CORRUPT),
        (20 * MIB, 8 * MIB, PageStatus.FAILED),
    ],
)
def test_a_large_page_is_read_in_ranges_side_by_side(size, broken, status):
    data = random.Random(1).randbytes(size)
    payload = memoryview(bytearray(20 * MIB - HEADER_BYTES))
    blob = Blob(memoryview(bytearray(HEADER_BYTES)), payload)
    name = ObjectName(PageKey(bytes(32)), "full", 0, 1)
    begins = range(0, size, 8 * MIB)
    server = Ranges(data, len(begins) - 1, broken)
    with served(server) as store:
        assert store.get([name], [blob], deadline=time.monotonic() + 120) == [status]
    expected = [(begin, min(begin + 8 * MIB, size)) for begin in begins]
    assert sorted(server.asked) == expected
    if broken is None:
        assert b"".join(blob)[:size] == data


class Overloaded(Gathering):
    """It has every object, and has no time to send any."""

    def __init__(self) -> None:
        super().__init__(0)

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        request.send_response(503)
        request.send_header("Content-Length", "0")
        request.end_headers()

    def look(self, request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("ETag", '"1"')
        request.send_header("Last-Modified", "Tue, 17 Nov 2026 10:00:00 GMT")
        request.send_header("Content-Length", str(20 * MIB))
        request.end_headers()


class ReadOnly(Overloaded):
    """It has every object, all of the same bytes, and takes nothing."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self.data = data

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("ETag", '"1"')
        request.send_header("Last-Modified", "Tue, 17 Nov 2026 10:00:00 GMT")
        request.send_header("Content-Length", str(len(self.data)))
        request.end_headers()
        request.wfile.write(self.data)


class Unconditional(Gathering):
    """It keeps what it is sent, unless that is on a condition: it does not know any."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(0)
        self.status, self.said = status, said.encode()
        self.objects: dict[str, bytes] = {}
        self.refused = 0

    def look(self, request: BaseHTTPRequestHandler) -> None:
        self._send(request, b"", self.objects.get(request.path))

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        self._send(request, self.objects.get(request.path, b""), self.objects.get(request.path))

    def keep(self, request: BaseHTTPRequestHandler) -> None:
        data = request.rfile.read(int(request.headers["Content-Length"]))
        is_refused = "If-None-Match" in request.headers
        self.refused += is_refused
        if not is_refused:
            self.objects[request.path] = data
        request.send_response(self.status if is_refused else 200)
        request.send_header("ETag", '"1"')
        request.send_header("Content-Length", str(len(self.said) if is_refused else 0))
        request.end_headers()
        request.wfile.write(self.said if is_refused else b"")

    def _send(self, request: BaseHTTPRequestHandler, body: bytes, there: bytes | None) -> None:
        request.send_response(404 if there is None else 200)
        request.send_header("ETag", '"1"')
        request.send_header("Last-Modified", "Tue, 17 Nov 2026 10:00:00 GMT")
        request.send_header("Content-Length", str(len(there or b"")))
        request.end_headers()
        request.wfile.write(body)


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (501, ""),
        (501, "<Error><Code>NotImplemented</Code></Error>"),
        (400, "<Error><Code>NotImplemented</Code></Error>"),
    ],
)
def test_a_server_that_knows_no_conditions_is_written_to_without(client, pages, status, said):
    """It is asked once, and that is remembered."""
    server = Unconditional(status, said)
    with served(server) as store:
        cache = client(store)
        assert pages.put_path(cache, 1) == [OK]
        refused = server.refused
        assert pages.put_path(cache, 2, 3, after=1) == [OK, OK]
        assert pages.get(cache, 1, 2, 3, 4) == [OK, OK, OK, MISS]
    assert refused >= 1
    assert server.refused == refused


def test_a_server_that_takes_nothing_at_all_is_not_taken_for_one_without_conditions(client, pages):
    server = Unconditional(503, "<Error><Code>SlowDown</Code></Error>")
    with served(server) as store:
        assert pages.put(client(store), 1) == [PageStatus.FAILED]
        assert store._knows_conditions
    assert not server.objects


def test_a_damaged_page_that_we_may_not_set_aside_is_told_as_damaged_c17(client, pages):
    """It is not called one that was deleted meanwhile."""
    with served(ReadOnly(b"x" * pages.object_bytes)) as store:
        cache = client(store)
        assert pages.get(cache, 1) == [PageStatus.CORRUPT]
        assert counted(cache, "mismatch") == {"magic": 1}


class Falling(ReadOnly):
    """As that, and who wants to change anything in it waits for ever."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.changes = 0
        self.is_over = threading.Event()

    def change(self) -> None:
        self.changes += 1
        self.is_over.wait(60)


def test_damaged_pages_in_a_bucket_that_falls_silent_hold_nobody_up_c17(client, pages, monkeypatch):
    """Setting them aside is a request of its own for each."""
    monkeypatch.setattr("quire.store.bucket._ASIDE_TIMEOUT_S", 0.5)
    server = Falling(b"x" * pages.object_bytes)
    with served(server) as store:
        cache = client(store)
        deadline = time.monotonic() + 0.4
        assert PageStatus.OK not in pages.get(cache, 1, 2, 3, deadline=deadline)
        server.is_over.set()
    assert server.changes <= 1


@pytest.mark.parametrize("page_bytes", [MIB, 20 * MIB])
def test_a_page_whose_server_is_overloaded_is_not_taken_for_a_damaged_one(page_bytes):
    """Whatever digits are in its name: 416 is also what a server says of an empty object."""
    blob = Blob(memoryview(bytearray(HEADER_BYTES)), memoryview(bytearray(page_bytes)))
    name = ObjectName(PageKey(bytes.fromhex("0416" * 16)), "full", 0, 1)
    with served(Overloaded()) as store:
        status = store.get([name], [blob], deadline=time.monotonic() + 60)
    assert status == [PageStatus.FAILED]


def test_a_large_page_comes_back_as_it_was(bucket):
    """From a server that knows ranges; an object without a byte is no page, and no failure."""
    store = open_store(bucket.url)
    names = [ObjectName(PageKey(bytes([n]) * 32), "full", 0, 1) for n in range(2)]
    data = random.Random(1).randbytes(20 * MIB)
    sent = Blob(memoryview(data[:HEADER_BYTES]), memoryview(data[HEADER_BYTES:]))
    into = [
        Blob(memoryview(bytearray(HEADER_BYTES)), memoryview(bytearray(sent.payload.nbytes)))
        for _ in names
    ]
    soon = time.monotonic() + 120
    try:
        assert store.put([NewObject(names[0], sent, None, 1)], deadline=soon) == [OK]
        send(bucket, f"cache/objects/01/{names[1].text}", b"")
        assert store.get(names, into, deadline=soon) == [OK, PageStatus.CORRUPT]
        assert b"".join(into[0]) == data
    finally:
        store.close()


def test_closing_ends_a_call_that_is_under_way(bucket, pages):
    """As when an engine stops, or takes another store, while the bucket does not answer."""
    store = open_store(bucket.url)
    names = [object_name(pages.part, pages.key(n)) for n in range(3)]
    blobs = [Blob(memoryview(bytearray(HEADER_BYTES)), pages.empty()) for _ in names]
    statuses = []
    started = threading.Event()

    def read():
        started.set()
        statuses.extend(store.get(names, blobs, deadline=time.monotonic() + 600))

    reader = threading.Thread(target=read, daemon=True)
    bucket.pause()
    try:
        reader.start()
        started.wait()
        time.sleep(0.2)
        store.close()
        reader.join(60)
        assert not reader.is_alive()
    finally:
        bucket.go_on()
    assert statuses == [PageStatus.FAILED] * 3
    assert store.get(names, blobs, deadline=time.monotonic() + 600) == [PageStatus.FAILED] * 3
    store.close()


@pytest.mark.parametrize(
    "url",
    ["s3://", "s3://u:pw@bucket", "s3://bucket?nothing=1", "gs://bucket?endpoint=http://x"],
)
def test_a_url_that_says_nothing_sensible_is_one_sentence_without_secrets(url):
    with pytest.raises(StoreURLError) as caught:
        open_store(url)
    assert "pw" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_bucket_that_is_not_there_is_not_taken_for_an_empty_one(bucket):
    """A name with a slip in it: an engine that starts with it would keep nothing."""
    with pytest.raises(StoreError, match="no such bucket: create it") as caught:
        open_store(bucket.url.replace("s3://pages/", "s3://pagse/"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("act", ["scan", "clear"])
def test_a_listing_that_fails_is_one_sentence_without_what_the_server_said(bucket, act):
    store = open_store(bucket.url)
    bucket.stop()
    try:
        with pytest.raises(StoreError, match="cannot be used") as caught:
            list(store.scan()) if act == "scan" else store.clear()
        assert "\n" not in str(caught.value)
    finally:
        store.close()
        bucket.start()


@pytest.mark.parametrize(
    ("status", "code", "sentence"),
    [
        ("403 Forbidden", "InvalidAccessKeyId", "does not take our credentials"),
        ("403 Forbidden", "SignatureDoesNotMatch", "does not take our credentials"),
        ("400 Bad Request", "ExpiredToken", "does not take our credentials"),
        ("403 Forbidden", "AccessDenied", "check the credentials and their rights"),
        ("403 Forbidden", "RequestTimeTooSkewed", "set this machine's clock"),
        ("400 Bad Request", "AuthorizationHeaderMalformed", r"in region eu-west-1: .*\?region="),
        ("301 Moved Permanently", "PermanentRedirect", r"in another region: .*\?region="),
        ("503 Slow Down", "SlowDown", "busy or in trouble"),
        ("418 Teapot", "Odd", r"cannot be used \(Odd\)"),
    ],
)
def test_a_bucket_that_does_not_want_us_says_what_to_check(bucket, status, code, sentence):
    """As S3 says it: the double lets everybody in."""
    link = Link(bucket.port)
    said = (
        f"<Error><Code>{code}</Code><Message>of someone: s3cret</Message>"
        "<Region>eu-west-1</Region><AWSAccessKeyId>someone</AWSAccessKeyId></Error>"
    )
    link.refusal = (
        f"HTTP/1.1 {status}\r\nContent-Type: application/xml\r\nConnection: close\r\n"
        f"Content-Length: {len(said)}\r\n\r\n{said}"
    ).encode()
    try:
        with pytest.raises(StoreError, match=sentence) as caught:
            open_store(bucket.url.replace(str(bucket.port), str(link.port)))
    finally:
        link.close()
    for secret in ("someone", "s3cret", "\n"):
        assert secret not in str(caught.value)


@pytest.mark.parametrize("endpoint", ["127.0.0.1:1", "ftp://127.0.0.1"])
def test_an_endpoint_that_is_no_address_is_refused(endpoint):
    with pytest.raises(StoreURLError, match="must begin with http:// or https://"):
        open_store(f"s3://bucket?endpoint={endpoint}&region=us-east-1")


def test_nobody_there_is_one_sentence_without_secrets():
    with pytest.raises(StoreError, match="cannot be reached: check its endpoint") as caught:
        open_store("s3://bucket?endpoint=http://127.0.0.1:1&region=us-east-1")
    assert "s3cret" not in str(caught.value)
    assert "\n" not in str(caught.value)
