"""Prefill and decode in separate engines: what a decode-side cache saves, and what it costs."""
