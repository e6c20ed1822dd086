"""Pages in the memory of a Mooncake pool: `mooncake://master:50051`, through its own client.

store.py          what each call of a store asks of the pool; by URL
pool.py           the client itself: one call at a time of each thread, its codes, its close
registration.py   memory the client knows: host pages in place, all else by way of a stage
master.py         what only the master's HTTP port tells: names and figures
"""

from quire.store.mooncake.store import MooncakeStore, open_url

__all__ = ["MooncakeStore", "open_url"]
