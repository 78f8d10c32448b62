"""Log-probs that a policy gives to responses.

Sequences come packed, one forward pass for all of them; logits exist in chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dora.model import decoder
from dora.model.config import ModelConfig
from dora.model.routing import Route
from dora.trainer.attention import attend_in_blocks
from dora.trainer.head import token_logprobs
from dora.trainer.packing import Packed

Values = Callable[[Packed], Tensor]


class Policy:
    """A decoder seen as a distribution over responses, at one sampling temperature.

    In exact mode, `values` says the log-probs [N] of a batch with the same `weights`, as engines compute
    them to the last bit; only their gradients are this decoder's own.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        temperature: float = 1.0,
        values: Values | None = None,
        *,
        logits_chunk_tokens: int = 256,
        keeps_activations: bool = True,
    ) -> None:
        """`logits_chunk_tokens` rows of logits exist at a time. Unless it `keeps_activations`, a layer
        keeps its input alone and runs once more on the way back.
        """
        self._values = values
        self._chunk_tokens = logits_chunk_tokens
        self._run = _keep if keeps_activations else _recompute
        self.config = config
        self.weights = weights
        self.temperature = temperature
        self.device = weights["model.norm.weight"].device
        cos, sin = decoder.rope_tables(config, config.max_position_embeddings)
        self._cos, self._sin = cos.to(self.device), sin.to(self.device)

    def under(self, weights: Mapping[str, Tensor], values: Values | None) -> Policy:
        """The same with other weights."""
        other = copy(self)
        other.weights, other._values = weights, values
        return other

    def logprobs(self, batch: Packed, route: Route | None = None) -> tuple[Tensor, Tensor]:
        """Log-probs of the response tokens [N] and the distribution's entropies [N], in nats.

        `route` chooses the experts of mixtures. Only positions that predict a response token go through
        the head.
        """
        rows = self.hidden(batch, route).index_select(0, batch.rows)
        head = decoder.head(self.weights)
        logprobs, spread = token_logprobs(rows, head, batch.targets, self.temperature, self._chunk_tokens)
        if self._values is not None:
            logprobs = self._values(batch) + (logprobs - logprobs.detach())  # that is 0, with a gradient
        return logprobs, spread

    def hidden(self, batch: Packed, route: Route | None = None) -> Tensor:
        """Final hidden states [M, hidden]."""
        cos, sin = (table.index_select(0, batch.positions) for table in (self._cos, self._sin))
        attend = attend_in_blocks(batch.blocks, batch.found)
        return decoder.forward(self.weights, self.config, batch.inputs, cos, sin, attend, route, self._run)


def _keep(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return layer(x)


def _recompute(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    found: Tensor = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False)
    return found
