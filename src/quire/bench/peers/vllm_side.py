"""One vLLM engine as a process that does what it is told, a line of JSON at a time. Knows vLLM.

    python -m quire.bench.peers.vllm_side < orders > answers

Runs with vLLM's own Python. The first order is how to build the engine; the others are answered in
their order. What libraries print goes to stderr.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from typing import Any

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several engines share these cores
    "OMP_WAIT_POLICY": "passive",
    "LMCACHE_TRACK_USAGE": "false",
    "PYTHONHASHSEED": "0",
}
SETTLE_S = 60.0
LMCACHE_CONNECTOR = "LMCacheMPConnector"


def main() -> None:
    os.environ.update(ENVIRONMENT)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine: Any = None
    for line in sys.stdin:
        order = json.loads(line)
        if engine is None:
            engine = _build(**order)
            found: dict[str, Any] = {}
        elif order["do"] == "ask":
            found = _ask(engine, order["prompts"], order["max_tokens"])
        else:
            found = _forget(engine)
        answers.write(json.dumps(found) + "\n")
        answers.flush()
    os._exit(0)  # threads of libraries may not end by themselves


def _build(model: str, max_model_len: int, at_once: int, transfer: dict[str, Any] | None) -> Any:
    from vllm.config import KVTransferConfig

    from vllm import LLM

    options = {}
    if transfer is not None:
        options["kv_transfer_config"] = KVTransferConfig(**transfer)
        if transfer["kv_connector"] == LMCACHE_CONNECTOR:
            _mend_numba()
    return LLM(
        model,
        dtype="float32",  # CPUs without instructions for less take longer over it
        max_model_len=max_model_len,
        max_num_batched_tokens=max_model_len,
        max_num_seqs=at_once,
        block_size=32,
        enforce_eager=True,
        **options,
    )


def _mend_numba() -> None:
    """LMCache imports numba, whose LLVM has a function of every name. vLLM looks into all modules
    for kernels of its own, asks it for its `__dict__`, gets a function and fails: here it gets
    none."""
    from llvmlite.binding import ffi

    library = type(ffi.lib)
    function = library.__getattr__

    def functions_only(self: Any, name: str) -> Any:
        if name == "__dict__":
            raise AttributeError(name)
        return function(self, name)

    library.__getattr__ = functions_only


def _ask(engine: Any, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    began = time.perf_counter()
    outputs = engine.generate(inputs, sampling, use_tqdm=False)
    seconds = time.perf_counter() - began
    _settle(engine)
    return {
        "seconds": seconds,
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "reused": [output.num_cached_tokens or 0 for output in outputs],
        "max_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
    }


def _settle(engine: Any) -> None:
    """Everything that is being saved has been."""
    core = engine.llm_engine.engine_core.engine_core
    until = time.monotonic() + SETTLE_S
    while core.scheduler.has_requests() and time.monotonic() < until:
        core.step()


def _forget(engine: Any) -> dict[str, Any]:
    """vLLM's own cache."""
    _settle(engine)
    return {"ok": bool(engine.llm_engine.reset_prefix_cache())}


if __name__ == "__main__":
    main()
