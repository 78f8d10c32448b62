"""A policy that transformers computes, and the choice between it and the policy of the own decoder."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dora.model.config import ModelConfig, TransformersConfig
from dora.model.decoder import run_layer_once
from dora.model.moe import Router
from dora.model.transformers_model import BLANK, TransformersModel
from dora.trainer.packing import PackedBatch
from dora.trainer.policy import BatchLogprobs, Policy, run_checkpointed
from dora.trainer.recipe import ModelImplementation


def policy_class(config: ModelConfig, implementation: ModelImplementation = "auto") -> type[Policy]:
    """The policy of a model under this `trainer.model`."""
    is_chosen = implementation == "transformers" or isinstance(config, TransformersConfig)
    return TransformersPolicy if is_chosen else Policy


class TransformersPolicy(Policy):
    """A policy whose forward pass is transformers', over blocks of sequences of similar lengths.

    Sequences are rows of a block, padded on the right, where causality hides the padding. So attention,
    sliding windows and linear attention need no mask and no support of packed sequences by the family.
    """

    takes_router = False
    is_sharded = False  # other ranks compute the same layers at the same time

    def with_weights(
        self, weights: Mapping[str, Tensor], exact_logprobs: BatchLogprobs | None
    ) -> TransformersPolicy:
        """The same policy with other weights."""
        other = super().with_weights(weights, exact_logprobs)
        assert isinstance(other, TransformersPolicy)
        other._model = TransformersModel(self.config, weights, self.device, self._dtype, self._images)
        return other

    def hidden_states(self, batch: PackedBatch, router: Router | None = None) -> Tensor:
        """Final hidden states [M, hidden]. The family's own router chooses experts."""
        assert router is None, "see `takes_router`"
        images = self._model.image_features(batch.input_ids, self._run_layer, is_sharded=self.is_sharded)
        inputs = [batch.input_ids[block] for block in batch.blocks]
        blocks = [self._model.hidden_states(x, run_layer=self._run_layer, images=images) for x in inputs]
        hidden = torch.cat([x.flatten(0, 1) for x in blocks]).index_select(0, batch.block_indices)
        return hidden + 0.0 * images[BLANK].layers.sum() if BLANK in images else hidden

    def _prepare(self, activation_checkpointing: bool) -> None:
        self._run_layer = run_checkpointed if activation_checkpointing else run_layer_once
        self._dtype = min((x.dtype for x in self.weights.values()), key=lambda dtype: dtype.itemsize)
        self._model = TransformersModel(self.config, self.weights, self.device, self._dtype, self._images)

    def _token_logprobs(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The family's own head; both passes handle a chunk of tokens at a time."""
        chunks = zip(hidden.split(self._chunk_tokens), targets.split(self._chunk_tokens), strict=True)
        parts = [
            checkpoint(self._chunk, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks
        ]
        logprobs, entropies = (torch.cat(column) for column in zip(*parts, strict=True))
        return logprobs, entropies

    def _chunk(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies [C] of a chunk."""
        logits = self._model.logits(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / self.temperature
        distribution = logits.log_softmax(-1)
        finite = distribution.clamp(min=torch.finfo(distribution.dtype).min)  # a probability of 0 adds 0
        entropies = -(distribution.exp() * finite).sum(-1)
        return distribution.gather(-1, targets[:, None]).squeeze(-1), entropies
