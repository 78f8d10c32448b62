"""Other ways to decode the same model: a bare torch loop, transformers, and vLLM in a child process.

All decode the same prompts on one thread, sample the same number of tokens at temperature 1, and return no
log-probs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from child import Child
from torch import Tensor
from torch.nn import functional as F

from dora.model.config import ModelConfig
from dora.model.decoder import apply_rope, rope_tables
from dora.model.weights import WeightLayout

Prompts = list[list[int]]
_BUCKET = 32  # the bare loop's context is trimmed to a multiple of this
_PAGE = 32  # tokens per page of continuous batching: with its default, 256, a step takes twice as long
_MAX_BATCH_TOKENS = 2048  # of prompts, per step of continuous batching


@dataclass(frozen=True)
class Timing:
    """Wall and CPU time of a decode step while all rows decode, and of the whole, prompts included.

    The whole is 0 if there is no prefill.
    """

    step_s: float
    step_cpu_s: float
    whole_s: float = 0.0
    whole_cpu_s: float = 0.0


class Bare:
    """A bare decode loop without an engine: a static cache, fused projections, no bookkeeping.

    The context is trimmed to that of the longest row, query heads that share a kv head are packed, and tokens
    stay in one tensor. It has no prefill: the cache holds zeros, which cost as much.
    """

    def __init__(self, config: ModelConfig, flat: Tensor) -> None:
        layout = self._layout = WeightLayout(config)
        self._config, self._weights = config, layout.views(flat)
        names = [f"model.layers.{i}." for i in range(config.num_hidden_layers)]
        self._qkv = [
            layout.span(flat, f"{x}self_attn.q_proj.weight", f"{x}self_attn.v_proj.weight") for x in names
        ]
        self._gate_up = [
            layout.span(flat, f"{x}mlp.gate_proj.weight", f"{x}mlp.up_proj.weight") for x in names
        ]

    @torch.inference_mode()
    def run(self, prompts: Prompts, num_tokens: int) -> Timing:
        config, rows = self._config, torch.arange(len(prompts))
        positions = torch.tensor([len(prompt) for prompt in prompts]) - 1
        most = -(-(int(positions.max()) + num_tokens) // _BUCKET) * _BUCKET
        shape = (config.num_hidden_layers, 2, len(prompts), config.num_key_value_heads, most, config.head_dim)
        cache, tables = torch.zeros(shape), rope_tables(config, most)
        tokens = torch.zeros(len(prompts), num_tokens, dtype=torch.int64)
        tokens[:, 0] = torch.tensor([prompt[-1] for prompt in prompts])
        clock = _Clock()
        for step in range(num_tokens - 1):
            logits = self._logits(tokens[:, step], positions, rows, cache, tables)
            tokens[:, step + 1] = torch.multinomial(logits.softmax(-1), 1)[:, 0]
            positions += 1
            clock.tick()
        return Timing(*clock.per_tick())

    def _logits(
        self,
        tokens: Tensor,
        positions: Tensor,
        rows: Tensor,
        cache: Tensor,
        tables: tuple[Tensor, Tensor],
    ) -> Tensor:
        config, weights, eps = self._config, self._weights, self._config.rms_norm_eps
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        cos, sin = (table[positions] for table in tables)
        width = -(-(int(positions.max()) + 1) // _BUCKET) * _BUCKET
        mask = torch.where(torch.arange(width) <= positions[:, None], 0.0, -torch.inf)[:, None, None]
        norm = partial(F.rms_norm, eps=eps)
        x = F.embedding(tokens, weights["model.embed_tokens.weight"])
        for i in range(config.num_hidden_layers):
            layer = f"model.layers.{i}."
            h = norm(x, x.shape[-1:], weights[layer + "input_layernorm.weight"])
            q, k, v = F.linear(h, self._qkv[i]).unflatten(-1, (-1, dim)).split([heads, kv_heads, kv_heads], 1)
            q = apply_rope(norm(q, (dim,), weights[layer + "self_attn.q_norm.weight"]), cos, sin)
            k = apply_rope(norm(k, (dim,), weights[layer + "self_attn.k_norm.weight"]), cos, sin)
            keys, values = cache[i]
            keys[rows, :, positions] = k
            values[rows, :, positions] = v
            mixed = F.scaled_dot_product_attention(
                q.unflatten(1, (kv_heads, -1)), keys[:, :, :width], values[:, :, :width], attn_mask=mask
            )
            x = x + F.linear(mixed.flatten(1), weights[layer + "self_attn.o_proj.weight"])
            h = norm(x, x.shape[-1:], weights[layer + "post_attention_layernorm.weight"])
            gate, up = F.linear(h, self._gate_up[i]).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, weights[layer + "mlp.down_proj.weight"])
        h = norm(x, x.shape[-1:], weights["model.norm.weight"])
        return F.linear(h, weights["model.embed_tokens.weight"])


class Transformers:
    """`generate` and continuous batching of a model folder, with SDPA attention."""

    def __init__(self, folder: Path) -> None:
        library = self._library = import_module("transformers")
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
        self._model: Any = library.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        )
        self._model.eval()

    @torch.inference_mode()
    def generate(self, prompts: Prompts, num_tokens: int) -> Timing:
        """One batch, padded on the left, with the default cache. A stopping criterion measures the time."""
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        whole, clock = _Clock(), _Clock()

        def criterion(ids: Tensor, scores: Any, **_: Any) -> Tensor:
            clock.tick()
            return torch.zeros(len(ids), dtype=torch.bool)

        self._model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=num_tokens,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            pad_token_id=0,
            use_cache=True,
            stopping_criteria=[criterion],
        )
        whole.tick()
        return Timing(*clock.per_tick(without_first=True), *whole.per_tick())

    def batch_continuously(self, prompts: Prompts, num_tokens: int) -> Timing:
        """Steps are measured by the times of tokens; their share of CPU time is that of the whole run."""
        # Twice the required number: with less, some prompts wait until others are finished.
        num_blocks = 2 * sum(-(-(len(prompt) + num_tokens) // _PAGE) for prompt in prompts)
        whole = _Clock()
        sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "eos_token_id": -1, "pad_token_id": 0}
        found = self._model.generate_batch(
            prompts,
            generation_config=self._library.GenerationConfig(max_new_tokens=num_tokens, **sampling),
            continuous_batching_config=self._library.ContinuousBatchingConfig(
                page_size=_PAGE,
                num_blocks=num_blocks,
                max_batch_tokens=_MAX_BATCH_TOKENS,
                allow_block_sharing=False,
                use_async_batching=False,
            ),
            record_timestamps=True,
            progress_bar=False,
        ).values()
        whole.tick()
        whole_s, whole_cpu_s = whole.per_tick()
        times = [request.timestamps for request in found]
        first_s, last_s = max(own[0] for own in times), min(own[-1] for own in times)
        num_decoded = sum(first_s < at_s <= last_s for own in times for at_s in own)
        step_s = (last_s - first_s) / num_decoded * len(prompts)
        return Timing(step_s, step_s * whole_cpu_s / whole_s, whole_s, whole_cpu_s)


class VllmChild:
    """vLLM in its own process, which waits for requests between measurements."""

    def __init__(self, python: Path, folder: Path, *sizes: int) -> None:
        self._child = Child(python, "vllm_child.py", [str(folder), *map(str, sizes)])
        self.stop = self._child.stop

    def run(self, prompts: Prompts, num_tokens: int) -> Timing:
        return Timing(**self._child.request({"prompts": prompts, "num_tokens": num_tokens}))


class _Clock:
    """Wall and CPU time of this process at the start and at every tick."""

    def __init__(self) -> None:
        self._times = [(time.perf_counter(), time.process_time())]

    def tick(self) -> None:
        self._times.append((time.perf_counter(), time.process_time()))

    def per_tick(self, without_first: bool = False) -> tuple[float, float]:
        """Mean wall and CPU time of a tick, from the start or from the first tick."""
        times = self._times[1:] if without_first else self._times
        (began_s, began_cpu_s), (ended_s, ended_cpu_s) = times[0], times[-1]
        num_ticks = len(times) - 1
        return (ended_s - began_s) / num_ticks, (ended_cpu_s - began_cpu_s) / num_ticks


Run = Callable[[Prompts, int], Timing]
