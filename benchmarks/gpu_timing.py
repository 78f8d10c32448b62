"""Options, models and timing that the GPU benchmarks share."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from models import DEMO

from dora.model.config import ModelConfig
from report import Options, make_parser, options_of

TINY = replace(
    DEMO, vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, head_dim=16,
)  # fmt: skip
QWEN3_8B = ModelConfig(
    vocab_size=151_936,
    hidden_size=4096,
    intermediate_size=12_288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=40_960,
    rope_theta=1e6,
    tie_word_embeddings=False,
)
QWEN3_4B = replace(QWEN3_8B, hidden_size=2560, intermediate_size=9728, tie_word_embeddings=True)
QWEN3_06B = replace(
    QWEN3_4B, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16
)


@dataclass(frozen=True)
class Bench:
    """The device, the options and the selected parts of a benchmark."""

    options: Options
    device: str
    only: tuple[str, ...]

    @property
    def is_tiny(self) -> bool:
        return self.options.quick

    @property
    def dtype(self) -> torch.dtype:
        """bf16 on a GPU; Triton's interpreter computes in fp32."""
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    def seconds(self, run: Callable[[], object], *, repeats: int = 20, is_captured: bool = True) -> float:
        """Mean time of `run`, on a GPU replayed as a CUDA graph if `is_captured`."""
        run()
        if self.device == "cpu":
            return _mean_s(run, 1 if self.is_tiny else repeats)
        if is_captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            run = graph.replay
            run()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / repeats

    def bandwidth(self) -> float:
        """Bytes per second that a copy within the device's memory reads and writes."""
        source = torch.zeros(2**20 if self.is_tiny else 2**32, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * source.nbytes / self.seconds(lambda: target.copy_(source))


def parse_bench(description: str) -> Bench:
    """Parse --device, --only (parts) and --quick (tiny sizes, to check that everything runs)."""
    parser = make_parser(description)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="*", default=(), metavar="PART", help="these parts only")
    given = parser.parse_args()
    return Bench(options_of(given), given.device, tuple(given.only))


def wait_for(device: str) -> None:
    """Wait until the device has finished all its work."""
    if device == "cuda":
        torch.cuda.synchronize()


def _mean_s(run: Callable[[], object], repeats: int) -> float:
    started_s = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - started_s) / repeats
