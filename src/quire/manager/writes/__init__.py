"""What is kept alive: device → host (backups.py), host → store (writes.py)."""

from quire.manager.writes.writer import Writer

__all__ = ["Writer"]
