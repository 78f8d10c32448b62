"""One decoder, used by the rollout engine and by the trainer alike.

`config` reads a Hugging Face `config.json`, `weights` lays all parameters out in one flat
buffer, `decoder` is the forward pass, `folder` loads and saves Hugging Face folders.
"""
