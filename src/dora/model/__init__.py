"""One decoder for four families of models, used by the rollout engine and by the trainer.

`config` is the shape, `weights` the flat buffer of all parameters, `decoder` the forward pass, `moe` the
mixture of experts, `pretrained` loads and saves Hugging Face folders.
"""
