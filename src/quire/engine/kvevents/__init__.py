"""Cache events for routers that people run already: vLLM's format, over ZeroMQ."""
