"""Floors: what a machine does at best, measured; and what a model needs of it, counted.

decode step   ≥ bytes of weights and of all keys and values read ÷ memory bandwidth
prompt        ≥ operations of its matrices ÷ their measured rate
hit in L2     ≥ bytes of its pages ÷ the link's measured rate
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from quire.engine.forward.spec import DenseSpec

_MATMUL = 8192
_SMALL_MATMUL = 512
_COPY_BYTES = {"cuda": 4 << 30, "cpu": 64 << 20}
_LINK_BYTES = {"cuda": 1 << 30, "cpu": 64 << 20}
_REPEATS = 10


@dataclass(frozen=True, slots=True)
class MachineSpeed:
    """As measured."""

    name: str
    memory_bytes_s: float
    """Read and written, of a copy on the device."""
    matmul_ops_s: float
    """Of large matrices of bfloat16 random numbers."""
    link_bytes_s: float
    """From pinned memory to the device, in one piece."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Of one model, in bfloat16."""

    weight_bytes: int
    """Read by every step: all but the embedding."""
    kv_bytes: int
    """Of one token."""
    matrix_ops: int
    """Of one token of a prompt: all layers, not the head."""
    head_ops: int
    attention_ops: int
    """Of one pair of query and key, all layers and heads."""

    @classmethod
    def of(cls, spec: DenseSpec) -> Needs:
        hidden, dim = spec.hidden_size, spec.head_dim
        heads = spec.num_q_heads + 2 * spec.num_kv_heads
        layer = hidden * dim * (heads + spec.num_q_heads) + 3 * hidden * spec.mlp_size
        matrices, head = layer * spec.num_layers, hidden * spec.vocab_size
        return cls(
            weight_bytes=2 * (matrices + head),
            kv_bytes=2 * 2 * spec.num_layers * spec.num_kv_heads * dim,
            matrix_ops=2 * matrices,
            head_ops=2 * head,
            attention_ops=4 * spec.num_layers * spec.num_q_heads * dim,
        )

    def decode_s(self, machine: MachineSpeed, batch: int, context: int) -> float:
        return (self.weight_bytes + batch * context * self.kv_bytes) / machine.memory_bytes_s

    def prompt_ops(self, tokens: int, cached: int = 0) -> int:
        pairs = tokens * cached + tokens * (tokens + 1) // 2
        return tokens * self.matrix_ops + pairs * self.attention_ops + self.head_ops


def measure(device: torch.device) -> MachineSpeed:
    kind = device.type
    name = torch.cuda.get_device_name(device) if kind == "cuda" else "cpu"
    source = torch.empty(_COPY_BYTES[kind] // 2, dtype=torch.bfloat16, device=device)
    source.normal_()
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / _seconds(partial(target.copy_, source), device)
    del source, target
    size = _MATMUL if kind == "cuda" else _SMALL_MATMUL
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    matmul = 2 * size**3 / _seconds(lambda: a @ b, device)
    host = torch.empty(_LINK_BYTES[kind], dtype=torch.uint8, pin_memory=kind == "cuda")
    there = torch.empty_like(host, device=device)
    link = host.nbytes / _seconds(lambda: there.copy_(host, non_blocking=True), device)
    return MachineSpeed(name, copied, matmul, link)


def _seconds(act: Callable[[], object], device: torch.device) -> float:
    """The median of some."""
    for _ in range(3):
        act()
    seconds = []
    for _ in range(_REPEATS):
        wait(device)
        began = time.perf_counter()
        act()
        wait(device)
        seconds.append(time.perf_counter() - began)
    return sorted(seconds)[_REPEATS // 2]


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
