"""Runs in vLLM's own environment: imports vLLM once, then makes a process for each engine.

    python scenario.py      a line of JSON in: an engine, its steps, where to write
                            two lines out: its process, and how that ended

What an engine's steps found is written to the file that its line names. Not a test: engines.py
starts it. Knows vLLM.
"""

import ctypes
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
SETTLE_S = 120.0

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    OMP_NUM_THREADS="2",
    OMP_WAIT_POLICY="passive",
    VLLM_LOGGING_LEVEL="WARNING",
)


def main() -> None:
    die_with_parent()
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_worker

    import vllm  # noqa: F401

    for line in sys.stdin:
        told = json.loads(line)
        process = os.fork()
        if process == 0:
            die_with_parent()
            live(told)
        print(process, flush=True)
        _, status = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def live(told: dict[str, Any]) -> None:
    """One engine, from its building to its end."""
    nothing, log = os.open(os.devnull, os.O_RDONLY), os.open(told["log"], os.O_CREAT | os.O_WRONLY)
    for mine, number in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(mine, number)
    os.environ.update(told.get("environment", {}))
    code = 1
    try:
        found = run(told)
        Path(told["result"]).write_text(json.dumps(found))
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    os._exit(code)


def run(told: dict[str, Any]) -> list[dict[str, Any]]:
    from vllm.config import KVTransferConfig

    from vllm import LLM

    options = {
        "dtype": "float32",
        "max_model_len": 2048,
        "max_num_batched_tokens": 2048,
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
    began = time.monotonic()
    llm = LLM(told["model"], **options)
    print(f"built in {time.monotonic() - began:.1f} s", file=sys.stderr)
    found = []
    for step in told["steps"]:
        found.append(STEPS[step.pop("do")](llm, **step))
        print(f"{time.monotonic() - began:.1f} s: {str(found[-1])[:100]}", file=sys.stderr)
    llm.llm_engine.engine_core.shutdown()
    return found


def generate(
    llm: Any,
    prompts: list[list[int]],
    max_tokens: int,
    *,
    salts: list[str] | None = None,
    adapter: str = "",
    sampling: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Answers to all of these at once: greedy ones, unless `sampling` says more. `adapter`: the
    directory of one."""
    from vllm.lora.request import LoRARequest

    inputs: list[dict[str, Any]] = [{"prompt_token_ids": prompt} for prompt in prompts]
    for one, salt in zip(inputs, salts or [], strict=False):
        one["cache_salt"] = salt
    outputs = llm.generate(
        inputs,
        greedy(max_tokens, **(sampling or {})),
        use_tqdm=False,
        lora_request=LoRARequest(Path(adapter).name, 1, adapter) if adapter else None,
    )
    return {
        "tokens": [list(one.token_ids) for output in outputs for one in output.outputs],
        "cached": [output.num_cached_tokens for output in outputs],
    }


def greedy(max_tokens: int, **more: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True} | more)


def abandon(llm: Any, prompts: list[list[int]], after_steps: list[int]) -> dict[str, Any]:
    """All of these are asked at once and then given up, each after so many steps."""
    engine = llm.llm_engine
    names = [
        engine.add_request(f"given up {number}", {"prompt_token_ids": prompt}, greedy(64))
        for number, prompt in enumerate(prompts)
    ]
    states = []
    for number in range(max(after_steps) + 1):
        for name, after in zip(names, after_steps, strict=True):
            if after == number:
                states.append(stage_of(llm, name))
                engine.abort_request([name], internal=True)
        engine.step()
    return {"states": states}


def reset_running(llm: Any, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    """Everything cached is forgotten while these run: all of them begin again."""
    engine = llm.llm_engine
    names = [
        engine.add_request(f"again {number}", {"prompt_token_ids": prompt}, greedy(max_tokens))
        for number, prompt in enumerate(prompts)
    ]
    while not any(stage_of(llm, name) == "RUNNING" for name in names):
        engine.step()
    for _ in range(4):
        engine.step()
    ok = engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    ended: dict[str, list[int]] = {}
    while len(ended) < len(names):
        for output in engine.step():
            if output.finished:
                ended[output.request_id] = list(output.outputs[0].token_ids)
    return {"ok": ok, "tokens": [ended[f"again {number}"] for number in range(len(prompts))]}


def stage_of(llm: Any, name: str) -> str:
    request = llm.llm_engine.engine_core.engine_core.scheduler.requests.get(name)
    return "gone" if request is None else str(request.status.name)


def forget_local(llm: Any) -> dict[str, Any]:
    """vLLM's own prefix cache; what is still being saved is waited for, since it keeps blocks."""
    settle(llm)
    return {"ok": llm.llm_engine.reset_prefix_cache()}


def reset(llm: Any) -> dict[str, Any]:
    settle(llm)
    return {"ok": llm.llm_engine.reset_prefix_cache(reset_connector=True)}


def remove(llm: Any, folder: str) -> dict[str, Any]:
    """With all that is in it."""
    shutil.rmtree(folder)
    return {}


def send(llm: Any, process: int, number: int) -> dict[str, Any]:
    """A signal to some process, between two questions."""
    os.kill(process, number)
    return {}


def settle(llm: Any) -> dict[str, Any]:
    """Steps until nothing is left to do; says what is held then."""
    core = llm.llm_engine.engine_core.engine_core
    scheduler = core.scheduler
    until = time.monotonic() + SETTLE_S
    while scheduler.has_requests() and time.monotonic() < until:
        core.step()
    pool = scheduler.kv_cache_manager.block_pool
    counts: dict[str, float] = {}
    for metric in llm.get_metrics():
        if hasattr(metric, "value"):
            counts[metric.name] = counts.get(metric.name, 0) + metric.value
            source = metric.labels.get("source")
            if source:
                name = f"{metric.name}:{source}"
                counts[name] = counts.get(name, 0) + metric.value
    found = {
        "busy": scheduler.has_requests(),
        "used_blocks": pool.num_gpu_blocks - pool.get_num_free_blocks(),
        "preemptions": counts["vllm:num_preemptions"],
        "metrics": {name: count for name, count in counts.items() if count and "cache" in name},
    }
    found["groups"] = len(scheduler.kv_cache_manager.kv_cache_config.kv_cache_groups)
    if scheduler.connector is not None:
        leader = scheduler.connector.leader
        leader.manager.check_invariants()
        found["leases"] = len(leader.manager.leases)
        found["counters"] = leader.manager.counters.snapshot()
        found["pools"] = {
            f"{use.component} {use.tier.name.lower()}": use.used_pages
            for use in leader.manager.pools()
        }
    return found


STEPS = {
    "generate": generate,
    "abandon": abandon,
    "reset_running": reset_running,
    "remove": remove,
    "forget_local": forget_local,
    "reset": reset,
    "send": send,
    "settle": settle,
}

if __name__ == "__main__":  # ranks are started with a look at this file
    main()
