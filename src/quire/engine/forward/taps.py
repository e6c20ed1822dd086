"""Taps: where a model leaves the outputs of some of its layers, for a draft head to look at."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Taps:
    def __init__(self, layers: Sequence[int], like: torch.Tensor, steady_rows: int = 0) -> None:
        """`layers`: from 0, may be none. `like`: [any, hidden] of the model's device and dtype.
        `steady_rows`: batches of up to so many tokens have them where they stay, for graphs."""
        self.layers = tuple(layers)
        self._size = like.shape[1]
        self._steady = like.new_empty((steady_rows, len(self.layers) * self._size))
        self.features = self._steady

    def begin(self, num_rows: int) -> None:
        """Of a batch of so many tokens."""
        if num_rows <= len(self._steady) or not self.layers:
            self.features = self._steady[:num_rows]
        else:
            self.features = self._steady.new_empty((num_rows, self._steady.shape[1]))

    def take(self, layer: int, hidden: torch.Tensor) -> None:
        """`hidden` [row, hidden]: what a layer has put out."""
        for index, wanted in enumerate(self.layers):
            if wanted == layer:
                first = index * self._size
                self.features[:, first : first + self._size].copy_(hidden)
