"""Log-probs that a policy gives to responses.

Sequences are padded on the right, so causality alone hides the padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dora.model import decoder
from dora.model.config import ModelConfig


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
    )


class Policy:
    """A decoder seen as a distribution over responses, at one sampling temperature."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], temperature: float = 1.0) -> None:
        self.config = config
        self.weights = weights
        self.temperature = temperature
        device = weights["model.norm.weight"].device
        cos, sin = decoder.rope_tables(config, config.max_position_embeddings)
        self._cos, self._sin = cos.to(device), sin.to(device)

    def logprobs(self, batch: Padded) -> tuple[Tensor, Tensor]:
        """Log-probs of the response tokens [N] and the distribution's entropies [N], in nats.

        Only positions that predict a response token go through the head. Entropies carry no gradient.
        """
        cos, sin = (table[: batch.length].repeat(batch.num_sequences, 1) for table in (self._cos, self._sin))
        attend = decoder.causal_attend(batch.num_sequences, batch.length)
        hidden = decoder.forward(self.weights, self.config, batch.inputs, cos, sin, attend)
        logits = decoder.logits(self.weights, hidden.index_select(0, batch.rows)) / self.temperature
        distribution = logits.log_softmax(-1)
        with torch.no_grad():
            entropies = -(distribution.exp() * distribution).sum(-1)
        return distribution.gather(-1, batch.targets[:, None]).squeeze(-1), entropies
