"""What a vLLM server needs to take weights from a file: `--worker-extension-cls peers_vllm.FileWeights`.

It runs in vLLM's own environment; `peers.py` puts a copy of it on that server's path.
"""

from __future__ import annotations

from typing import Any


class FileWeights:
    """A mix-in of vLLM's worker; its method is called with POST /collective_rpc."""

    model_runner: Any

    def load_file(self, path: str) -> bool:
        """Put the tensors of a safetensors file, by their names in a checkpoint, in place of the model's."""
        from safetensors.torch import load_file

        self.model_runner.reload_weights(weights_iterator=iter(load_file(path).items()))
        # On a CPU a head multiplies with a packed copy of its weight, and vLLM 0.32 packs none again that
        # has the embedding's: it would go on with the head that the server began with.
        head = self.model_runner.get_model().lm_head
        head.quant_method.process_weights_after_loading(head)
        return True
