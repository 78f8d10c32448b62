"""Inference engines that are not DORA-RL's own: vLLM and SGLang servers."""
