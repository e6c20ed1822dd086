"""Pages in Redis or Valkey, one server or a cluster: `redis://host`, `rediss://host`.

    store.py        Store: what each call says to the server
    nodes.py        which server has which key, and calls that go to several at once
    connection.py   one connection: bytes, deadlines, TLS, who we are
    wire.py         RESP: commands out, answers in

What stays when memory is short, and for how long, is the server's to decide (`maxmemory`,
`maxmemory-policy`). Nothing is needed but a socket: no client library.
"""

from quire.store.redis.store import RedisStore, open_url

__all__ = ["RedisStore", "open_url"]
