"""Quire: a three-tier KV cache for LLM inference."""
