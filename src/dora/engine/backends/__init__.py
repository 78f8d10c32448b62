"""Inference engines that are not DORA's own: vLLM and SGLang servers."""
