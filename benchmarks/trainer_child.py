"""One trainer in its own process, for `trainer.py`, which measures the time and memory of its steps.

    PYTHON trainer_child.py KIND MODEL_FOLDER '{"sequences": n, "tokens": n, ...}'

KIND is dora (with further settings of TrainerSettings), plain or trl. The process writes {"ready": true} when
it is ready. For every line [[prompt ids, response ids, advantage], ...] on its input it takes one step and
writes {"step_s", "step_cpu_s", "grad_norm", "peak_bytes"}. `peak_bytes` is the step's peak memory without
that of a process which has taken a step with MODEL_FOLDER/tiny, so it does not count libraries.
"""

from __future__ import annotations

import gc
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "MALLOC_MMAP_THRESHOLD_": str(2**20),  # return freed memory at once, so that peaks are real
    "MALLOC_TRIM_THRESHOLD_": str(2**20),
}
LR, CLIP, MAX_NORM = 1e-5, 0.2, 1.0

Samples = list[tuple[list[int], list[int], float]]
Step = Callable[[Samples], float]


def main() -> None:
    if os.environ.get("MALLOC_TRIM_THRESHOLD_") != SETTINGS["MALLOC_TRIM_THRESHOLD_"]:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **SETTINGS})
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to stderr, not between the replies
    kind, folder, settings = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    import_module("torch").set_num_threads(1)

    def reply(content: dict[str, Any]) -> None:
        print(json.dumps(content), file=replies, flush=True)

    if kind == "trl":
        trl(folder, settings, reply)
        return
    make = {"dora": dora, "plain": plain}[kind]
    make(folder / "tiny", settings)([([1, 2], [3, 4, 5], 1.0)] * 4)
    gc.collect()
    before, step = _process_bytes("VmRSS"), make(folder, settings)
    reply({"ready": True})
    for samples in batches():
        measurement = StepMeasurement(before)
        norm = step(samples)
        reply(measurement.result(norm))


def batches() -> Iterator[Samples]:
    for line in sys.stdin:
        yield json.loads(line)


class StepMeasurement:
    """Time and peak memory of a step that starts now."""

    def __init__(self, before: int) -> None:
        self._before = before
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the peak
        self._started = time.perf_counter(), time.process_time()

    def result(self, grad_norm: float) -> dict[str, float]:
        start_s, start_cpu_s = self._started
        return {
            "step_s": time.perf_counter() - start_s,
            "step_cpu_s": time.process_time() - start_cpu_s,
            "grad_norm": grad_norm,
            "peak_bytes": _process_bytes("VmHWM") - self._before,
        }


def dora(folder: Path, sizes: dict[str, Any]) -> Step:
    """DORA's trainer, with the whole batch at once."""
    from dora.model.pretrained import load_pretrained
    from dora.trainer.trainer import Sample, Trainer, TrainerSettings

    config, flat = load_pretrained(folder)
    own = {key: value for key, value in sizes.items() if key not in ("sequences", "tokens")}
    settings = TrainerSettings(
        lr=LR,
        num_steps=10**6,
        warmup_steps=0,
        lr_decay="constant",
        max_grad_norm=MAX_NORM,
        micro_batch_tokens=sizes["tokens"],
        **own,
    )
    trainer = Trainer(config, flat, settings)
    behaviour = _behaviour(config.vocab_size)

    def step(samples: Samples) -> float:
        return trainer.step([Sample(p, r, [behaviour] * len(r), a) for p, r, a in samples])["actor/grad_norm"]

    return step


def plain(folder: Path, sizes: dict[str, Any]) -> Step:
    """The simplest loop: micro-batches of a fixed number of sequences, padded to the longest."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM
    model = loaded.from_pretrained(folder, dtype=torch.float32)
    model.train()
    adamw = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)
    behaviour = _behaviour(model.config.vocab_size)

    def step(samples: Samples) -> float:
        total = sum(len(response) for _, response, _ in samples)
        for i in range(0, len(samples), sizes["sequences"]):
            part = samples[i : i + sizes["sequences"]]
            length = max(len(prompt) + len(response) for prompt, response, _ in part)
            ids = torch.zeros(len(part), length, dtype=torch.int64)
            attended, counts = torch.zeros_like(ids), torch.zeros(len(part), length)
            for row, (prompt, response, _) in enumerate(part):
                num = len(prompt) + len(response)
                ids[row, :num] = torch.tensor([*prompt, *response])
                attended[row, :num] = 1
                counts[row, len(prompt) : num] = 1.0
            logits = model(input_ids=ids, attention_mask=attended, use_cache=False).logits[:, :-1]
            logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
            advantages = torch.tensor([a for _, _, a in part])[:, None]
            ratio = (logprobs - behaviour).exp()
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            losses = torch.maximum(-advantages * ratio, -advantages * clipped) * counts[:, 1:]
            (losses.sum() / total).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
        adamw.step()
        adamw.zero_grad()
        return norm

    return step


def trl(folder: Path, sizes: dict[str, Any], reply: Callable[[dict[str, Any]], None]) -> None:
    """TRL's GRPOTrainer, which gets samples in place of generating and scoring them."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    before = _process_bytes("VmRSS")
    reply({"ready": True})
    source = batches()
    first = next(source)
    running: list[StepMeasurement] = []

    class FedTrainer(GRPOTrainer):  # type: ignore[misc]
        pending = first

        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            samples, self.pending = self.pending or next(source, []), []
            if not samples:
                sys.exit()
            running.append(StepMeasurement(before))
            return padded_batch(samples)

    class ReplyCallback(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            reply(running.pop().result(float("nan")))

    words = Tokenizer(models.WordLevel({str(i): i for i in range(32)}, unk_token="0"))
    with tempfile.TemporaryDirectory() as out:
        settings = GRPOConfig(
            output_dir=out,
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=sizes["sequences"],
            gradient_accumulation_steps=len(first) // sizes["sequences"],
            num_generations=sizes["sequences"],
            learning_rate=LR,
            lr_scheduler_type="constant",
            max_grad_norm=MAX_NORM,
            max_steps=10**6,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        trainer = FedTrainer(
            model=str(folder),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": ["1 2"] * 64}),
            processing_class=PreTrainedTokenizerFast(
                tokenizer_object=words, pad_token="0", eos_token="1", unk_token="0"
            ),
            callbacks=[ReplyCallback()],
        )
        trainer.train()


def padded_batch(samples: Samples) -> dict[str, Any]:
    """A batch in TRL's layout: prompts padded on the left, responses on the right."""
    import torch

    prompts, responses = [prompt for prompt, _, _ in samples], [response for _, response, _ in samples]
    longest = max(map(len, prompts)), max(map(len, responses))
    before = [[0] * (longest[0] - len(prompt)) for prompt in prompts]
    after = [[0] * (longest[1] - len(response)) for response in responses]
    mask = torch.tensor([[1] * len(r) + gap for r, gap in zip(responses, after, strict=True)])
    return {
        "prompt_ids": torch.tensor([gap + p for p, gap in zip(prompts, before, strict=True)]),
        "prompt_mask": torch.tensor([gap + [1] * len(p) for p, gap in zip(prompts, before, strict=True)]),
        "completion_ids": torch.tensor([r + gap for r, gap in zip(responses, after, strict=True)]),
        "completion_mask": mask,
        "advantages": torch.tensor([a for _, _, a in samples]),
        "num_items_in_batch": mask.sum(),
    }


def _behaviour(vocab_size: int) -> float:
    """About the log-prob of every token under a model of small weights."""
    return -math.log(vocab_size)


def _process_bytes(name: str) -> int:
    """A memory figure of this process, in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}: this benchmark needs Linux")


if __name__ == "__main__":
    main()
