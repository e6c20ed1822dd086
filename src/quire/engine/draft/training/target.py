"""TeacherModel: the model a head is made for, through transformers, and what a head sees of it.

Features are the outputs of three of its layers; choices are its logits. Knows transformers'
modules; nothing of heads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

from quire.engine.draft.headweights import draft_target
from quire.errors import ConfigError
from quire.models import describe, load_model, read_config


class Seen(NamedTuple):
    features: torch.Tensor
    """[sequence, token, 3 × hidden]"""
    logits: torch.Tensor
    """[sequence, token, vocabulary]: of the token after each."""


class TeacherModel:
    def __init__(self, directory: Path, *, dtype: torch.dtype, device: torch.device) -> None:
        """Raises ModelError, and ConfigError for a model that heads cannot be made for."""
        self.text: Any = read_config(directory).get_text_config()
        shape = describe(directory)
        loaded = load_model(directory, dtype=dtype, device=torch.device("cpu"), attention="sdpa")
        model: Any = loaded
        model.to(device)
        self.model = model
        self.device, self.dtype = device, dtype
        self.num_q_heads = shape.num_q_heads
        self.shape = draft_target(shape, self.text.hidden_size)
        if shape.recurrent_layers:
            raise ConfigError(
                "heads are made for models whose layers all have attention: this one has recurrent "
                "layers, whose state cannot be rolled back when a proposal is rejected"
            )
        self._layers = model.get_decoder().layers

    @property
    def embedding(self) -> torch.Tensor:
        weight: torch.Tensor = self.model.get_input_embeddings().weight
        return weight

    @property
    def lm_head(self) -> torch.Tensor:
        weight: torch.Tensor = self.model.get_output_embeddings().weight
        return weight

    @property
    def last_norm(self) -> torch.Tensor:
        weight: torch.Tensor = self.model.get_decoder().norm.weight
        return weight

    @torch.no_grad()
    def see(self, tokens: torch.Tensor, layers: tuple[int, ...]) -> Seen:
        """`tokens` [sequence, token], on the device."""
        caught: dict[int, torch.Tensor] = {}

        def catch(number: int) -> Any:
            def hook(_module: Any, _inputs: Any, output: Any) -> None:
                caught[number] = output[0] if isinstance(output, tuple) else output

            return hook

        hooks = [self._layers[n].register_forward_hook(catch(n)) for n in set(layers)]
        try:
            logits = self.model(input_ids=tokens, use_cache=False).logits
        finally:
            for hook in hooks:
                hook.remove()
        return Seen(torch.cat([caught[number] for number in layers], -1), logits)
