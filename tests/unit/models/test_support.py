"""Which configurations are accepted, and the reason given for the others."""

import pytest
import transformers

from quire.errors import ModelError
from quire.models import check_supported


def config(name, **changes):
    return getattr(transformers, f"{name}Config")(**changes)


@pytest.mark.parametrize(
    "accepted",
    [
        config("Llama"),
        config("Qwen2"),
        config("Qwen3"),
        config("Qwen3Moe"),
        config("Mixtral"),
        config("Phi3"),
        config("GPT2"),
        config("Mistral", sliding_window=None),
        config("Mistral", sliding_window=4096, use_sliding_window=False),
        config("Mistral", sliding_window=4096, max_position_embeddings=4096),
        config("Qwen2", sliding_window=4096, use_sliding_window=False),
        config("Llama", architectures=["LlamaForCausalLM"]),
        config("Llama", rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}),
    ],
    ids=lambda c: c.model_type,
)
def test_plain_decoders_are_accepted(accepted):
    check_supported(accepted)


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        (config("Mistral", sliding_window=4096), "window of 4096"),
        (config("Qwen2", use_sliding_window=True, max_window_layers=2), "sliding_attention"),
        (config("Gemma3Text"), "sliding_attention"),
        (config("Llama4Text"), "chunked_attention"),
        (config("MiniMax"), "linear_attention"),
        (config("Lfm2", full_attn_idxs=[2]), "conv"),
        (config("Mamba"), "recurrent"),
        (config("Mamba2"), "recurrent"),
        (config("Jamba"), "recurrent"),
        (config("FalconH1"), "recurrent"),
        (config("NemotronH"), "recurrent"),
        (config("Qwen3Next"), "recurrent"),
        (config("Zamba2"), "recurrent"),
        (config("GraniteMoeHybrid"), "recurrent"),
        (config("Bamba"), "recurrent"),
        (config("RecurrentGemma"), "recurrent"),
        (config("Rwkv"), "recurrent"),
        (config("T5"), "encoder"),
        (config("Whisper"), "encoder"),
        (config("Bert"), "causal"),
        (config("CLIP"), "causal"),
        (config("Llama", architectures=["LlamaForSequenceClassification"]), "causal"),
        (config("Gemma3"), "more than text"),
        (config("Bloom"), "attention"),
        (config("DeepseekV3"), "compressed"),
        (
            config(
                "Llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
            ),
            "dynamic",
        ),
    ],
    ids=lambda c: getattr(c, "model_type", None),
)
def test_others_are_refused_with_the_reason(refused, reason):
    with pytest.raises(ModelError, match=f"{refused.model_type}.*{reason}"):
        check_supported(refused)
