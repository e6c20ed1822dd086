from unit.server.conftest import engine, rig

__all__ = ["engine", "rig"]
