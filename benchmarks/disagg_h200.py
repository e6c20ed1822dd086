"""Prefill and decode engines on one GPU: the decode-side cache on and off, and a unified engine.

For a machine without the server's dependencies: engines are processes, asked over their own line.
The model has the shape of Qwen3-8B and random weights, made on the spot: times are honest, tokens
are not words.

    python benchmarks/disagg_h200.py OUTPUT.json
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import torch

from evidence.disagg.sessions import Plan
from evidence.disagg.turns import measured
from evidence.random_weights import write_model
from quire.engine.config import EngineConfig, Role

GIB = 1 << 30


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "model"
        began = time.monotonic()
        write_model(directory, "qwen3-8b", device=torch.device("cuda"))
        torch.cuda.empty_cache()
        print(f"model made in {time.monotonic() - began:.0f} s", flush=True)
        store = f"file://{folder}/store?max=20GiB"

        def config(role: Role, device: int, host: int, **options: object) -> EngineConfig:
            return EngineConfig(
                model=str(directory),
                name="qwen3-8b-shape",
                device="cuda",
                dtype="bfloat16",
                page_size=64,
                device_bytes=device * GIB,
                host_bytes=host * GIB,
                chunk_tokens=2048,
                role=role,
                peer_secret="only for a benchmark",
                **options,  # type: ignore[arg-type]
            )

        plan = Plan()
        result = measured(
            config(Role.PREFILL, 12, 36, store=store, peer_port=0),
            config(Role.DECODE, 14, 19, store=store, peer_port=0),
            config(Role.UNIFIED, 14, 19, store=store),
            plan,
            lambda side, done, total: print(f"{done}/{total} {side}", flush=True),
        )
    result["device"] = torch.cuda.get_device_name()
    Path(sys.argv[1]).write_text(json.dumps(result, indent=1))
    for name, parts in result["compared"].items():
        for part, figures in parts.items():
            print(
                f"{name}, {part}: TTFT mean {figures['ttft_mean']:.3f}, "
                f"P99 {figures['ttft_p99']:.3f}, TPOT {figures['tpot']['of_means']}"
            )
    for side, figures in result["sides"].items():
        print(side, figures["ttft_later_s"], figures["tpot_s"], figures["received_bytes"])
        print("   ", figures["cached_tokens"], figures["prompt_tokens"])


if __name__ == "__main__":
    main()
