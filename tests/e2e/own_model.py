"""A user's own model, importable by name where the replicas run."""

from __future__ import annotations

from torch import Tensor

from engine import DecoderModel


class Contrary(DecoderModel):
    """Likes best what the decoder likes least."""

    def logits(self, hidden: Tensor) -> Tensor:
        return -super().logits(hidden)
