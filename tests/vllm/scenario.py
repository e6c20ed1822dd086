"""Runs in vLLM's own environment: one engine in one process, through the steps it is told.

    python scenario.py < scenario.json      writes one JSON list, of what each step found

Not a test: test_engine.py starts it. Knows vLLM.
"""

import json
import os
import sys
import time
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    OMP_NUM_THREADS="2",
    VLLM_LOGGING_LEVEL="ERROR",
)


def main() -> None:
    told = json.load(sys.stdin)
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not our answer
    found = run(told)
    json.dump(found, answer)
    answer.close()
    os._exit(0)


def run(told: dict[str, Any]) -> list[dict[str, Any]]:
    from vllm.config import KVTransferConfig

    from vllm import LLM

    options = {
        "dtype": "float32",
        "max_model_len": 2048,
        "block_size": 32,
        "enforce_eager": True,
        "disable_log_stats": False,
        **told.get("llm", {}),
    }
    if told.get("connector"):
        options["kv_transfer_config"] = KVTransferConfig(
            kv_connector=told["connector"],
            kv_connector_module_path=told.get("module", "quire.integrations.vllm"),
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=told["extra"],
        )
    llm = LLM(told["model"], **options)
    steps = {"generate": generate, "forget_local": forget_local, "reset": reset, "settle": settle}
    found = [steps[step.pop("do")](llm, **step) for step in told["steps"]]
    llm.llm_engine.engine_core.shutdown()
    return found


def generate(
    llm: Any, prompts: list[list[int]], max_tokens: int, salts: list[str] | None = None
) -> dict[str, Any]:
    """Greedy answers to all of these at once."""
    from vllm import SamplingParams

    inputs: list[dict[str, Any]] = [{"prompt_token_ids": prompt} for prompt in prompts]
    for one, salt in zip(inputs, salts or [], strict=False):
        one["cache_salt"] = salt
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    began = time.monotonic()
    outputs = llm.generate(inputs, sampling, use_tqdm=False)
    return {
        "seconds": time.monotonic() - began,
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "cached": [output.num_cached_tokens for output in outputs],
    }


def forget_local(llm: Any) -> dict[str, Any]:
    """vLLM's own prefix cache; what is still being saved is waited for, since it keeps blocks."""
    settle(llm)
    return {"ok": llm.llm_engine.reset_prefix_cache()}


def reset(llm: Any) -> dict[str, Any]:
    settle(llm)
    return {"ok": llm.llm_engine.reset_prefix_cache(reset_connector=True)}


def settle(llm: Any) -> dict[str, Any]:
    """Steps until nothing is left to do; says what is held then."""
    core = llm.llm_engine.engine_core.engine_core
    scheduler = core.scheduler
    until = time.monotonic() + 60
    while scheduler.has_requests() and time.monotonic() < until:
        core.step()
    pool = scheduler.kv_cache_manager.block_pool
    found = {
        "busy": scheduler.has_requests(),
        "used_blocks": pool.num_gpu_blocks - pool.get_num_free_blocks(),
        "preemptions": sum(
            metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions"
        ),
    }
    if scheduler.connector is not None:
        leader = scheduler.connector.leader
        leader.manager.check_invariants()
        found["leases"] = len(leader.manager.leases)
        found["counters"] = leader.manager.counters.snapshot()
    return found


if __name__ == "__main__":  # ranks are started with a look at this file
    main()
