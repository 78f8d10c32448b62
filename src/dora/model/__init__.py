"""One decoder for four families, used by the rollout engine and by the trainer alike.

`config` reads a Hugging Face `config.json`, `rope` stretches positions, `weights` lays all
parameters out in one flat buffer, `decoder` is the forward pass, `routing` sends tokens to
experts, `folder` loads and saves Hugging Face folders.
"""
