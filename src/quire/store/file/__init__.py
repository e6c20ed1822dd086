"""The file store: one object is one file, content-addressed, shared by any number of processes.

store.py    FileStore: the Store protocol on top of the rest
layout.py   where everything lies below the root, and whose directory it is
io.py       moving a group of objects between files and host pages
aio.py      Linux AIO through the C library, for many transfers with few switches
budget.py   bytes used, shared with other processes; what is evicted
scan.py     what is there when the store is opened
space.py    free-space guard and the read-only state
"""

from quire.store.file.store import FileStore, open_url

__all__ = ["FileStore", "open_url"]
