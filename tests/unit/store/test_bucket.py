"""A bucket: what cannot be opened says why, and what others keep there stays. On a test double."""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from quire.errors import StoreError, StoreURLError
from quire.store.base import HEADER_BYTES, Blob
from quire.store.codec import object_name
from quire.store.url import open_store, parse_url
from quire.types import PageStatus

OK, MISS = PageStatus.OK, PageStatus.MISS


pytest.importorskip("obstore", reason="needs the packages of the s3 extra")
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


class Gathering(ThreadingHTTPServer):
    """Answers nobody before so many have asked."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, number: int) -> None:
        self.all_here = threading.Barrier(number, timeout=60)
        super().__init__(("127.0.0.1", 0), Asked)


class Asked(BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.server.all_here.wait()
        self.send_response(404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        """Quietly."""


def test_all_keys_of_a_probe_are_asked_for_at_once(pages):
    """256 questions take as long as one: each is answered only when all of them have come."""
    number = 256
    server = Gathering(number)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    url = f"s3://bucket?endpoint=http://127.0.0.1:{server.server_port}&region=us-east-1"
    store = BucketStore(bucket_of(parse_url(url)))
    try:
        names = [object_name(pages.part, pages.key(n)) for n in range(number)]
        assert store.contains(names, deadline=time.monotonic() + 120) == [False] * number
    finally:
        store.close()
        server.shutdown()
        serving.join()
        server.server_close()


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


def test_nobody_there_is_one_sentence_without_secrets():
    with pytest.raises(StoreError) as caught:
        open_store("s3://bucket?endpoint=http://127.0.0.1:1&region=us-east-1")
    assert "s3cret" not in str(caught.value)
    assert "\n" not in str(caught.value)
