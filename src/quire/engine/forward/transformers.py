"""TransformersForward: a model of transformers, with its attention over our pages.

For any decoder that `models.support` lets through, and the oracle for our own. Each attention
module is given a reference to the bridge. A model without recurrent layers computes a batch as one
packed row. One with them cannot: all single tokens are computed together, one sequence a row, and
every longer segment by itself. In a graph (graphs.py) it is the same, on memory that stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from quire.engine.attention import Heads
from quire.engine.batch import Batch
from quire.engine.bridge import AttentionBridge, Inputs
from quire.engine.recurrent_states import RecurrentStates
from quire.errors import ModelError
from quire.types import OperationId

ATTENTION = "quire"
"""Our name in transformers' attention interface."""
_BRIDGE = "_quire_bridge"

_HARMLESS = frozenset(
    (
        "attention_mask",
        "cache_position",
        "dropout",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_ids",
        "use_cache",
    )
)
"""What models pass along with their queries that changes nothing in our attention."""


class TransformersForward:
    def __init__(
        self,
        model: torch.nn.Module,
        bridge: AttentionBridge,
        *,
        states: RecurrentStates | None = None,
    ) -> None:
        """`states`: of the recurrent layers, if there are any. Raises ModelError if the model has
        attention in other layers than the bridge."""
        connect(model, bridge)
        self._model = model
        self._bridge = bridge
        self._states = states

    @property
    def packs(self) -> bool:
        return self._states is None

    @property
    def features(self) -> torch.Tensor:
        raise ModelError("the modules of transformers are not tapped")

    @property
    def failed(self) -> Mapping[OperationId, str]:
        return self._bridge.failed

    def logits(self, batch: Batch, drawn: torch.Tensor | None = None) -> torch.Tensor:
        self._bridge.forget()
        if self._states is None:
            return self._packed(batch, drawn)
        return self._in_parts(batch, drawn, self._states)

    def new_logits(self, num_rows: int) -> torch.Tensor:
        head: torch.Tensor = self._model.get_output_embeddings().weight  # type: ignore[operator]
        return head.new_empty((num_rows, head.shape[0]))

    def after_replay(self, num_tokens: int) -> None:
        pass  # nobody looks into it

    def compute(self, inputs: Inputs, out: torch.Tensor | None = None) -> torch.Tensor:
        if self._states is None:
            logits = self._row_of(inputs)
        else:
            assert inputs.states is not None
            self._states.begin_at(inputs.states)
            logits = self._column_of(inputs.tokens[:, None], inputs.positions[:, None])
        return logits if out is None else out.copy_(logits)

    def _packed(self, batch: Batch, drawn: torch.Tensor | None) -> torch.Tensor:
        return self._row_of(self._bridge.begin(batch, drawn))

    def _row_of(self, inputs: Inputs) -> torch.Tensor:
        ends = inputs.ends
        output = self._model(
            input_ids=inputs.tokens[None],
            position_ids=inputs.positions[None],
            use_cache=False,
            # To transformers 0 is all; of a batch without rows we need none, and get the last.
            logits_to_keep=0 if ends is None else ends if len(ends) else 1,
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def _column_of(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Both [sequences, tokens], after the states have begun → [sequences, vocabulary]"""
        assert self._states is not None
        output = self._model(
            input_ids=tokens,
            position_ids=positions,
            past_key_values=self._states,
            use_cache=True,
            logits_to_keep=1,
        )
        self._states.finish()
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def _in_parts(
        self, batch: Batch, drawn: torch.Tensor | None, states: RecurrentStates
    ) -> torch.Tensor:
        found: dict[int, torch.Tensor] = {}
        for members in _parts(batch):
            segments = [batch.segments[i] for i in members]
            inputs = self._bridge.begin(Batch(batch.number, segments), drawn)
            shape = (len(segments), -1)  # either has one token each, or there is only one
            states.begin(segments)
            logits = self._column_of(inputs.tokens.view(shape), inputs.positions.view(shape))
            found |= zip(members, logits, strict=True)
        wanted = [i for i, segment in enumerate(batch.segments) if segment.row is not None]
        return torch.stack([found[i] for i in wanted or found])


def _parts(batch: Batch) -> Iterator[list[int]]:
    """Segments that a model with recurrent layers computes together, by their places."""
    singles = [i for i, segment in enumerate(batch.segments) if segment.num_tokens == 1]
    if singles:
        yield singles
    for i, segment in enumerate(batch.segments):
        if segment.num_tokens > 1:
            yield [i]


def register_attention() -> None:
    """Make our attention known to transformers. Harmless to repeat."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _attention)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_mask: object,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """query [sequences, heads, tokens, dim], key and value alike but of kv heads
    → [sequences, tokens, heads, dim]; the tokens of all sequences are one packed row."""
    if is_causal is False or options.keys() - _HARMLESS:
        _check_options(is_causal, options)
    bridge: AttentionBridge = getattr(module, _BRIDGE)
    layer: int = module.layer_idx  # type: ignore[assignment]
    attended = bridge.attend(
        layer,
        Heads(_row(query), _row(key), _row(value)),
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        sinks=s_aux,
    )
    return attended.view(query.shape[0], query.shape[2], *attended.shape[1:]), None


def _row(tensor: torch.Tensor) -> torch.Tensor:
    """[sequences, heads, tokens, dim] → [heads, sequences × tokens, dim]"""
    return tensor[0] if tensor.shape[0] == 1 else tensor.transpose(0, 1).flatten(1, 2)


def _check_options(is_causal: bool | None, options: Mapping[str, object]) -> None:
    """Raises ModelError rather than leave something out of the computation."""
    if is_causal is False:
        raise ModelError("the model's attention looks ahead: it cannot be served")
    for name in sorted(options.keys() - _HARMLESS):
        # Flags say what a caller wants to have returned.
        if options[name] is not None and not isinstance(options[name], bool):
            raise ModelError(f"the model's attention needs {name!r}, which is not supported yet")


def connect(model: torch.nn.Module, bridge: AttentionBridge) -> None:
    """Give every attention module its bridge. Raises ModelError if the model has others."""
    layers = [module for module in model.modules() if _attends(module)]
    found = sorted(module.layer_idx for module in layers)  # type: ignore[type-var]
    expected = sorted(bridge.places)
    if found != expected:
        raise ModelError(
            f"the model has attention in layers {found}, its configuration says {expected}: "
            "models of this kind cannot be served yet"
        )
    for module in layers:
        setattr(module, _BRIDGE, bridge)


def _attends(module: torch.nn.Module) -> bool:
    """Whether it may call the attention interface, which looks at these in the module."""
    return isinstance(getattr(module, "layer_idx", None), int) and any(
        hasattr(module, name) for name in ("is_causal", "num_key_value_groups", "k_proj")
    )
