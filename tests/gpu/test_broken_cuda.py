"""A kernel that faults: the engine ends, and nothing computed since is shared.

In a process of its own, because no other test could use the GPU after it.
"""

import subprocess
import sys

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

SCRIPT = """
import sys
import numpy as np, torch
from quire.engine.build import build_engine
from quire.engine.config import EngineConfig
from quire.engine.executor import RankLost
from quire.engine.messages import Generate, SamplingParams
from quire.types import RequestId
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
                     num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048)
LlamaForCausalLM(config).save_pretrained(sys.argv[1])
engine = build_engine(EngineConfig(model=sys.argv[1], name="m", device="cuda", dtype="bfloat16",
                                   device_bytes=32 << 20, host_bytes=32 << 20))

def ask(name, tokens):
    engine.handle(Generate(RequestId(name), np.array(tokens, "<i4").tobytes(),
                           SamplingParams(max_tokens=4, temperature=0)))
    return next(r.key for r in engine.scheduler.requests() if r.id == name)

good = ask("good", range(100))
while len(engine.scheduler):
    engine.step()
assert engine.manager.match(good).num_pages == 6
launch = engine._executor._rank.runner.launch

def faulty(batch):
    torch.zeros(4, device="cuda")[torch.full((1,), 1 << 40, device="cuda")]
    return launch(batch)

engine._executor._rank.runner.launch = faulty
bad = ask("bad", range(200, 300))
try:
    for _ in range(10):
        engine.step()
except RankLost as error:
    assert "accelerator is broken" in str(error), error
    assert engine.manager.match(bad).num_pages == 0
    print("ended, nothing shared")
"""


def test_a_kernel_that_faults_ends_the_engine_and_shares_nothing(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "m")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "ended, nothing shared" in done.stdout, done.stdout + done.stderr
