"""Quire beside other caches inside vLLM: the same prompts to each, in turn, in one run."""
