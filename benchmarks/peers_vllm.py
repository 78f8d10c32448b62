"""What a vLLM server needs to load weights from a file: `--worker-extension-cls peers_vllm.FileWeights`.

It runs in vLLM's own environment; `peers.py` puts a copy of it on that server's path.
"""

from __future__ import annotations

from typing import Any


class FileWeights:
    """A mix-in of vLLM's worker; its method is called with POST /collective_rpc."""

    model_runner: Any

    def load_file(self, path: str) -> bool:
        """Replace the model's weights by those of a safetensors file, named as in a checkpoint."""
        from safetensors.torch import load_file

        self.model_runner.reload_weights(weights_iterator=iter(load_file(path).items()))
        # On a CPU the LM head multiplies with a packed copy of its weight. vLLM 0.32 does not pack it again
        # if the weight is tied to the embedding's, and would keep the initial head.
        head = self.model_runner.get_model().lm_head
        head.quant_method.process_weights_after_loading(head)
        return True
