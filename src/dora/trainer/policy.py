"""Log-probs that a policy gives to responses.

Sequences are padded on the right, so causality alone hides the padding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from dora.model import decoder
from dora.model.config import ModelConfig
from dora.model.routing import Route
from dora.trainer.loss import entropies


@dataclass(frozen=True)
class Padded:
    """Sequences (prompt + response) padded on the right; B sequences of up to L tokens.

    `inputs` [B * L] are all tokens but each sequence's last. `rows` [N] are the positions in it
    that predict a response token, `targets` [N] those tokens, sequence after sequence.
    """

    inputs: Tensor
    rows: Tensor
    targets: Tensor
    num_sequences: int
    length: int
    prompts: Sequence[Sequence[int]]
    responses: Sequence[Sequence[int]]


def pad(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], device: torch.device) -> Padded:
    """Lay sequences out for one forward pass. Prompts must not be empty."""
    sequences = [[*prompt, *response][:-1] for prompt, response in zip(prompts, responses, strict=True)]
    length = max(map(len, sequences))
    inputs = torch.tensor([tokens + [0] * (length - len(tokens)) for tokens in sequences], device=device)
    rows = [
        i * length + position
        for i, (prompt, tokens) in enumerate(zip(prompts, sequences, strict=True))
        for position in range(len(prompt) - 1, len(tokens))
    ]
    targets = [token for response in responses for token in response]
    return Padded(
        inputs.flatten(),
        torch.tensor(rows, device=device),
        torch.tensor(targets, device=device),
        len(sequences),
        length,
        prompts,
        responses,
    )


Values = Callable[[Padded], Tensor]


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
    ) -> None:
        self._values = values
        self.config = config
        self.weights = weights
        self.temperature = temperature
        device = weights["model.norm.weight"].device
        cos, sin = decoder.rope_tables(config, config.max_position_embeddings)
        self._cos, self._sin = cos.to(device), sin.to(device)

    def under(self, weights: Mapping[str, Tensor], values: Values | None) -> Policy:
        """The same with other weights."""
        other = copy(self)
        other.weights, other._values = weights, values
        return other

    def logprobs(
        self, batch: Padded, route: Route | None = None, keeps_entropy_graph: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Log-probs of the response tokens [N] and the distribution's entropies [N], in nats.

        `route` chooses the experts of mixtures. Only positions that predict a response token go through
        the head. Entropies carry a gradient only if that is asked for.
        """
        cos, sin = (table[: batch.length].repeat(batch.num_sequences, 1) for table in (self._cos, self._sin))
        attend = decoder.causal_attend(batch.num_sequences, batch.length)
        hidden = decoder.forward(self.weights, self.config, batch.inputs, cos, sin, attend, route)
        logits = decoder.logits(self.weights, hidden.index_select(0, batch.rows)) / self.temperature
        distribution = logits.log_softmax(-1)
        with torch.set_grad_enabled(keeps_entropy_graph and torch.is_grad_enabled()):
            spread = entropies(distribution)
        logprobs = distribution.gather(-1, batch.targets[:, None]).squeeze(-1)
        if self._values is not None:
            logprobs = self._values(batch) + (logprobs - logprobs.detach())  # that is 0, with a gradient
        return logprobs, spread
