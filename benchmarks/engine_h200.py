"""Time to first token on a GPU, found in each tier beside computed: the engine in this process.

For a machine without the server's dependencies, where `quire bench ttft` cannot run. The model has
the shape of Qwen3-8B and random weights, made on the spot: times are honest, tokens are not words.

    python benchmarks/engine_h200.py OUTPUT.json
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from quire.engine.build import build_engine
from quire.engine.config import EngineConfig
from quire.engine.engine import Engine
from quire.engine.messages import CachedTokens, Generate, Outputs, SamplingParams
from quire.types import RequestId, Tier

GIB = 1 << 30
LENGTHS = (1_000, 4_000, 16_000, 32_000)
REPEATS = 3
NUM_TOKENS = 4


def make_model(directory: Path) -> None:
    config = Qwen3Config(
        vocab_size=151_936,
        hidden_size=4096,
        intermediate_size=12_288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(directory)


class Asker:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.number = 0

    def ask(self, tokens: np.ndarray) -> tuple[float, list[int], CachedTokens]:
        """Seconds to the first token, the tokens, and where the prompt was found."""
        self.settle()
        self.number += 1
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0)
        began = time.perf_counter()
        first: float | None = None
        answer: list[int] = []
        cached = CachedTokens()
        self.engine.handle(
            Generate(RequestId(f"r{self.number}"), tokens.astype("<i4").tobytes(), params)
        )
        while True:
            if not self.engine.step():
                time.sleep(0.0005)
            for message in self.engine.take_messages():
                for output in message.outputs if isinstance(message, Outputs) else []:
                    assert not output.error, output.error
                    first = first or time.perf_counter() - began
                    answer += output.tokens
                    cached = output.cached or cached
                    if output.finish is not None:
                        assert first is not None
                        return first, answer, cached

    def settle(self) -> None:
        while not self.engine.manager.idle:
            self.engine.step()
            time.sleep(0.001)


def measure(asker: Asker, length: int, seed: int) -> dict[str, float]:
    manager = asker.engine.manager
    prompt = np.random.default_rng(seed).integers(0, 150_000, length)
    times: dict[str, float] = {}
    times["computed"], cold, _ = asker.ask(prompt)
    times["device"], found, cached = asker.ask(prompt)
    assert cached.device > 0.9 * length, cached
    asker.settle()
    manager.flush(Tier.DEVICE)
    times["host"], again, cached = asker.ask(prompt)
    assert cached.host > 0.9 * length, cached
    assert again[0] == found[0]
    asker.settle()
    manager.flush(Tier.DEVICE)
    manager.flush(Tier.HOST)
    times["store"], again, cached = asker.ask(prompt)
    assert again[0] == found[0]
    times["store_share"] = cached.store / length
    times["same_as_computed"] = float(cold == found)
    return times


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "model"
        make_model(directory)
        torch.cuda.empty_cache()
        config = EngineConfig(
            model=str(directory),
            name="qwen3-8b-shape",
            device="cuda",
            dtype="bfloat16",
            device_bytes=24 * GIB,
            host_bytes=24 * GIB,
            store=f"file://{folder}/store?max=24GiB",
            chunk_tokens=8192,
        )
        engine = build_engine(config)
        try:
            asker = Asker(engine)
            measure(asker, 1_000, 0)  # not counted: the first batches of each shape
            results = []
            for length in LENGTHS:
                rounds = [measure(asker, length, 1 + i + length) for i in range(REPEATS)]
                result = {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
                results.append({"tokens": length, **result, "rounds": rounds})
                print(json.dumps({k: v for k, v in results[-1].items() if k != "rounds"}))
            print(engine.status().counters)
        finally:
            engine.close()
    report = {
        "device": torch.cuda.get_device_name(),
        "model": "Qwen3-8B shape, random weights, bf16",
        "page_size": config.page_size,
        "results": results,
    }
    Path(sys.argv[1]).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
