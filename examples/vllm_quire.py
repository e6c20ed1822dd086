"""vLLM with Quire behind its KV cache, in one screen.

    python examples/vllm_quire.py MODEL [STORE]

Asks one question about a long text; forgets vLLM's own cache; asks another one. The second time the
text comes from Quire. Run it twice with a store, such as file:///tmp/kv?max=5GiB: the second run
finds the text that the first one has read.

On a CPU: python -m quire.bench.peers.install FOLDER, and set VLLM_CPU_KVCACHE_SPACE=1.
"""

import sys
import time

from vllm.config import KVTransferConfig

from vllm import LLM, SamplingParams

TEXT = "Every bridge tells of the river that it crosses, and of those who built it. " * 60
QUESTIONS = ("What does a bridge tell of?", "Who is this text about?")


def main(model: str, store: str = "") -> None:
    quire = KVTransferConfig(
        kv_connector="QuireConnector",
        kv_connector_module_path="quire.integrations.vllm",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"host_memory": "1GiB", "store": store},
    )
    llm = LLM(model, max_model_len=2048, kv_transfer_config=quire)
    for question in QUESTIONS:
        began = time.monotonic()
        answers = llm.generate(
            [f"{TEXT}\n{question}"], SamplingParams(temperature=0, max_tokens=16), use_tqdm=False
        )
        reused, total = answers[0].num_cached_tokens, len(answers[0].prompt_token_ids or [])
        seconds = time.monotonic() - began
        print(f"{seconds:.2f} s, {reused} of {total} tokens not computed: {question}")
        llm.reset_prefix_cache()


if __name__ == "__main__":
    main(*sys.argv[1:])
