"""Time to first token of a hit that the host cannot hold, on a GPU: through the host in parts.

One engine with an ample host fills the store; another, whose host holds a quarter of the prompt's
pages, finds the prompt there. Beside it the same prompt computed, in the same engine. The shape of
Qwen3-8B, random weights, the engine in this process. Where the store is slower than computing, the
cost model leaves most of the hit there: a folder in memory is faster, most disks are not.

    python benchmarks/stream_h200.py OUTPUT.json [FOLDER OF THE STORE]
"""

import gc
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from evidence.random_weights import write_model
from quire.bench.gpu.driving import Drive
from quire.engine.build import build_engine
from quire.engine.config import EngineConfig
from quire.types import Tier

GIB = 1 << 30
NUM_TOKENS = 4
LENGTHS = (16_000, 32_000)
TOKEN_BYTES = 147_456


def config(directory: Path, folder: str, host_bytes: int) -> EngineConfig:
    return EngineConfig(
        model=str(directory),
        name="qwen3-8b-shape",
        device="cuda",
        dtype="bfloat16",
        device_bytes=24 * GIB,
        host_bytes=host_bytes,
        store=f"file://{folder}/store?max=40GiB",
        chunk_tokens=8192,
    )


def main() -> None:
    results = []
    place = sys.argv[2] if len(sys.argv) > 2 else None
    with tempfile.TemporaryDirectory() as weights, tempfile.TemporaryDirectory(dir=place) as folder:
        directory = Path(weights) / "model"
        write_model(directory, "qwen3-8b", device=torch.device("cuda"))
        torch.cuda.empty_cache()
        prompts = {n: np.random.default_rng(n).integers(0, 150_000, n, "i4") for n in LENGTHS}
        answers = {}
        engine = build_engine(config(directory, folder, 16 * GIB))
        asker = Drive(engine)
        for length, prompt in prompts.items():
            answers[length] = asker.ask(prompt, NUM_TOKENS).tokens
            asker.settle()
        engine.close()
        del engine, asker
        gc.collect()
        torch.cuda.empty_cache()
        for length, prompt in prompts.items():
            engine = build_engine(config(directory, folder, length * TOKEN_BYTES // 4))
            try:
                asker = Drive(engine)
                for _ in range(2):  # the first batches of a shape are not counted
                    other = np.random.default_rng(length + 7).permutation(prompt)
                    computed = asker.ask(other, NUM_TOKENS).first_token_s
                    asker.forget(Tier.DEVICE, Tier.HOST)
                rounds = []
                for _ in range(3):
                    asker.forget(Tier.DEVICE, Tier.HOST)
                    found = asker.ask(prompt, NUM_TOKENS)
                    cached = found.reused
                    rounds.append((found.first_token_s, cached.device, cached.host, cached.store))
                    same = found.tokens == answers[length]
                results.append(
                    {"tokens": length, "computed_s": computed, "rounds": rounds, "same": same}
                )
                results[-1]["streams"] = engine.status().counters.get("streams", 0)
                print(json.dumps(results[-1]), flush=True)
            finally:
                engine.close()
                del engine, asker
                gc.collect()
                torch.cuda.empty_cache()
    Path(sys.argv[1]).write_text(json.dumps({"results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
