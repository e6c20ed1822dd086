"""The file store: one object is one file, content-addressed, shared by any number of processes.

store.py        FileStore: the Store protocol on top of the rest
layout.py       where everything lies below the root, and whose directory it is
io.py           moving a group of objects between files and host pages
aio.py          Linux AIO through the C library, for many transfers with few switches
writing.py      temporary files, published in the order in which pages need each other
uses.py         the order of use: the files' own times
cold.py         what goes next, the same for all processes
budget.py       bytes used, counted together with other processes; room for what is written
shared_file.py  a small file that processes change in turn
scan.py         the background look at the directory
space.py        free-space guard and the read-only state
"""

from quire.store.file.store import FileStore, open_url

__all__ = ["FileStore", "open_url"]
