"""What a recurrent layer remembers of a sequence, for the kinds of models known to resume from it.

    state of one layer:   [ conv: channels × kernel )  padding  [ recurrent: heads × … )  padding
                          in the model's dtype                  in float32
                          ╰── starts and ends on 16 bytes ──────────────────────────────────────╯

Only kinds listed here are served. Each was run against transformers' own cache: in one go, in
pieces of several tokens, and several sequences at once. The engine compares the shapes said here
with what the model gives it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_ALIGNMENT = 16
_RECURRENT_DTYPE = "float32"
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class StatePart:
    """One tensor within a state."""

    shape: tuple[int, ...]
    dtype: str
    offset: int
    """Of its first byte."""

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * _DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Where the bytes of one layer's state of one sequence are."""

    conv: StatePart
    recurrent: StatePart | None
    size_bytes: int


@dataclass(frozen=True, slots=True)
class StateShape:
    """The state of one recurrent layer; all of a model's are alike."""

    conv: tuple[int, int]
    """Channels and kernel: the last inputs of the convolution."""
    recurrent: tuple[int, int, int] | None
    """Heads and the two sides of each one's matrix; None: the convolution is all there is."""

    def layout(self, dtype: str) -> StateLayout:
        """For a model run in `dtype`."""
        conv = StatePart(self.conv, dtype, 0)
        size_bytes = _aligned(conv.size_bytes)
        if self.recurrent is None:
            return StateLayout(conv, None, size_bytes)
        recurrent = StatePart(self.recurrent, _RECURRENT_DTYPE, size_bytes)
        return StateLayout(conv, recurrent, size_bytes + _aligned(recurrent.size_bytes))


def state_shape(text: Any) -> StateShape:
    """Of a configuration that `refusal` has nothing against."""
    return _SHAPES[text.model_type](text)


def refusal(text: Any) -> str | None:
    """Why a model with recurrent layers cannot be served; None: it can."""
    if text.model_type == "jamba":
        return "its recurrent layers resume wrongly from a saved state for more than one token"
    if text.model_type not in _SHAPES:
        return "it has recurrent layers of a kind that is not known here"
    if getattr(text, "mamba_rms_norm", False):
        return "its recurrent layers mix up the sequences of a batch (mamba_rms_norm)"
    return None


def _mamba2(text: Any) -> StateShape:
    inner = getattr(text, "mamba_d_ssm", None) or int(text.mamba_expand * text.hidden_size)
    channels = inner + 2 * text.mamba_n_groups * text.mamba_d_state
    return StateShape(
        (channels, text.mamba_d_conv), (text.mamba_n_heads, text.mamba_d_head, text.mamba_d_state)
    )


def _nemotron(text: Any) -> StateShape:
    heads, dim = text.mamba_num_heads, text.mamba_head_dim
    channels = heads * dim + 2 * text.n_groups * text.ssm_state_size
    return StateShape((channels, text.conv_kernel), (heads, dim, text.ssm_state_size))


def _delta_net(text: Any) -> StateShape:
    key_dim, value_dim = text.linear_key_head_dim, text.linear_value_head_dim
    heads = text.linear_num_value_heads
    channels = 2 * text.linear_num_key_heads * key_dim + heads * value_dim
    return StateShape((channels, text.linear_conv_kernel_dim), (heads, key_dim, value_dim))


def _short_conv(text: Any) -> StateShape:
    return StateShape((text.hidden_size, text.conv_L_cache), None)


_SHAPES: dict[str, Callable[[Any], StateShape]] = {
    "bamba": _mamba2,
    "falcon_h1": _mamba2,
    "granitemoehybrid": _mamba2,
    "lfm2": _short_conv,
    "lfm2_moe": _short_conv,
    "nemotron_h": _nemotron,
    "qwen3_5_moe_text": _delta_net,
    "qwen3_5_text": _delta_net,
    "qwen3_next": _delta_net,
}


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
