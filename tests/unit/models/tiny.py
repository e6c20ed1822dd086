"""A GGUF file as llama.cpp's tools write them, small enough to convert in a test."""

from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter

LAYERS, HIDDEN, FEED_FORWARD, HEADS, KV_HEADS = 2, 64, 96, 4, 2
CHAT_TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}"
END_OF_TEXT, END_OF_TURN = 1, 2


def byte_alphabet() -> list[str]:
    """The characters that stand for the 256 bytes in byte-level tokenizers."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return list(bytes_to_unicode().values())


def write_tiny_gguf(
    path: Path,
    *,
    seed: int = 0,
    leave_out: str = "",
    extra: str = "",
    kind: GGMLQuantizationType = GGMLQuantizationType.Q8_0,
) -> Path:
    """A random Llama with two layers. `leave_out` and `extra` name tensors; `kind`: of matrices."""
    rng = np.random.default_rng(seed)
    tokens = ["<s>", "</s>", "<turn>", *byte_alphabet(), "he", "ll"]
    writer = GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["h e", "l l"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(END_OF_TEXT)
    writer.add_eot_token_id(END_OF_TURN)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, shape in tensors(len(tokens)).items():
        if name != leave_out:
            add_tensor(writer, name, rng.standard_normal(shape, dtype=np.float32) * 0.1, kind)
    if extra:
        add_tensor(writer, extra, np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tensor(
    writer: GGUFWriter,
    name: str,
    values: np.ndarray,
    kind: GGMLQuantizationType = GGMLQuantizationType.Q8_0,
) -> None:
    """Matrices as they are stored, vectors plain, as usual."""
    if values.ndim == 1:
        writer.add_tensor(name, values)
    else:
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)


def tensors(vocab_size: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab_size, HIDDEN)}
    kv = HIDDEN // HEADS * KV_HEADS
    for layer in range(LAYERS):
        block = {
            "attn_norm": (HIDDEN,),
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (kv, HIDDEN),
            "attn_v": (kv, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_norm": (HIDDEN,),
            "ffn_gate": (FEED_FORWARD, HIDDEN),
            "ffn_up": (FEED_FORWARD, HIDDEN),
            "ffn_down": (HIDDEN, FEED_FORWARD),
        }
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in block.items()}
    return shapes | {"output_norm.weight": (HIDDEN,)}
