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
        config("Mistral", sliding_window=4096, max_position_embeddings=4096),
        config("Qwen2", sliding_window=4096, use_sliding_window=False),
        config("Llama", architectures=["LlamaForCausalLM"]),
        config("Llama", rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}),
        config("Gemma3Text"),
        config("GptOss"),
        config("Qwen2", use_sliding_window=True, max_window_layers=2),
        config("FalconH1"),
        config("NemotronH"),
        config("Qwen3Next"),
        config("Qwen3_5Text"),
        config("GraniteMoeHybrid", layer_types=["linear_attention", "full_attention"] * 16),
        config("Bamba", attn_layer_indices=[2]),
        config("Lfm2", full_attn_idxs=[2]),
    ],
    ids=lambda c: c.model_type,
)
def test_decoders_whose_state_the_engine_can_keep_are_accepted(accepted):
    check_supported(accepted)


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        (config("Mistral", sliding_window=4096), "window of 4096"),
        (config("Mistral", sliding_window=4096, use_sliding_window=False), "window of 4096"),
        (config("Qwen2", use_sliding_window=True, max_window_layers=0), "no layer of full"),
        (config("Gemma2"), "softcapping"),
        (config("Gemma3Text", use_bidirectional_attention=True), "looks ahead"),
        (config("Llama4Text"), "chunked_attention"),
        (config("MiniMax"), "recurrent"),
        (config("Mamba"), "recurrent"),
        (config("Mamba2"), "recurrent"),
        (config("Jamba"), "resume wrongly from a saved state for more than one token"),
        (config("FalconH1", mamba_rms_norm=True), "mix up the sequences"),
        (config("Zamba2"), "recurrent"),
        (config("OlmoHybrid"), "recurrent"),
        (config("GraniteMoeHybrid"), "no layer of full_attention"),
        (config("Bamba"), "no layer of full_attention"),
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
