"""One trainer in its own process, for `trainer.py`: its steps are timed, its memory is its own.

    PYTHON trainer_child.py KIND MODEL_FOLDER '{"sequences": n, "tokens": n, ...}'

KIND is dora (further settings are TrainerSettings'), plain or trl. It writes {"ready": true} when it is up;
then, for every line [[prompt ids, response ids, advantage], ...] it reads, it takes one step and writes
{"step_s", "step_cpu_s", "grad_norm", "peak_bytes"}. The last one is what the step had at most beyond a
process that has taken a step with MODEL_FOLDER/tiny, so that it counts no libraries.
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
    "MALLOC_MMAP_THRESHOLD_": str(2**20),  # what is freed goes back, so that a peak is one
    "MALLOC_TRIM_THRESHOLD_": str(2**20),
}
LR, CLIP, MAX_NORM = 1e-5, 0.2, 1.0

Samples = list[tuple[list[int], list[int], float]]
Step = Callable[[Samples], float]


def main() -> None:
    if os.environ.get("MALLOC_TRIM_THRESHOLD_") != SETTINGS["MALLOC_TRIM_THRESHOLD_"]:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **SETTINGS})
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not get between the answers
    kind, folder, given = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    import_module("torch").set_num_threads(1)

    def answer(content: dict[str, Any]) -> None:
        print(json.dumps(content), file=answers, flush=True)

    if kind == "trl":
        trl(folder, given, answer)
        return
    make = {"dora": dora, "plain": plain}[kind]
    make(folder / "tiny", given)([([1, 2], [3, 4, 5], 1.0)] * 4)
    gc.collect()
    before, step = _of_status("VmRSS"), make(folder, given)
    answer({"ready": True})
    for samples in orders():
        timed = Timed(before)
        norm = step(samples)
        answer(timed.told(norm))


def orders() -> Iterator[Samples]:
    for line in sys.stdin:
        yield json.loads(line)


class Timed:
    """A step that begins now."""

    def __init__(self, before: int) -> None:
        self._before = before
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak is that of now
        self._began = time.perf_counter(), time.process_time()

    def told(self, grad_norm: float) -> dict[str, float]:
        began_s, began_cpu_s = self._began
        return {
            "step_s": time.perf_counter() - began_s,
            "step_cpu_s": time.process_time() - began_cpu_s,
            "grad_norm": grad_norm,
            "peak_bytes": _of_status("VmHWM") - self._before,
        }


def dora(folder: Path, given: dict[str, Any]) -> Step:
    """DORA's trainer, with all of the batch at once."""
    from dora.model.folder import load_folder
    from dora.trainer.trainer import Sample, Trainer, TrainerSettings

    config, flat = load_folder(folder)
    own = {key: value for key, value in given.items() if key not in ("sequences", "tokens")}
    settings = TrainerSettings(
        lr=LR,
        num_steps=10**6,
        warmup_steps=0,
        lr_decay="constant",
        max_grad_norm=MAX_NORM,
        micro_batch_tokens=given["tokens"],
        **own,
    )
    trainer = Trainer(config, flat, settings)
    behaviour = _behaviour(config.vocab_size)

    def step(samples: Samples) -> float:
        return trainer.step([Sample(p, r, [behaviour] * len(r), a) for p, r, a in samples])["actor/grad_norm"]

    return step


def plain(folder: Path, given: dict[str, Any]) -> Step:
    """What one writes first: micro-batches of so many sequences, padded on the right to their longest."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM
    model = loaded.from_pretrained(folder, dtype=torch.float32)
    model.train()
    adamw = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)
    behaviour = _behaviour(model.config.vocab_size)

    def step(samples: Samples) -> float:
        total = sum(len(response) for _, response, _ in samples)
        for i in range(0, len(samples), given["sequences"]):
            part = samples[i : i + given["sequences"]]
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


def trl(folder: Path, given: dict[str, Any], answer: Callable[[dict[str, Any]], None]) -> None:
    """TRL's GRPOTrainer, which is handed samples where it would generate and score them."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    before = _of_status("VmRSS")
    answer({"ready": True})
    source = orders()
    first = next(source)
    clock: list[Timed] = []

    class Fed(GRPOTrainer):  # type: ignore[misc]
        waiting = first

        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            samples, self.waiting = self.waiting or next(source, []), []
            if not samples:
                sys.exit()
            clock.append(Timed(before))
            return generated(samples)

    class Telling(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            answer(clock.pop().told(float("nan")))

    words = Tokenizer(models.WordLevel({str(i): i for i in range(32)}, unk_token="0"))
    with tempfile.TemporaryDirectory() as out:
        settings = GRPOConfig(
            output_dir=out,
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=given["sequences"],
            gradient_accumulation_steps=len(first) // given["sequences"],
            num_generations=given["sequences"],
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
        trainer = Fed(
            model=str(folder),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": ["1 2"] * 64}),
            processing_class=PreTrainedTokenizerFast(
                tokenizer_object=words, pad_token="0", eos_token="1", unk_token="0"
            ),
            callbacks=[Telling()],
        )
        trainer.train()


def generated(samples: Samples) -> dict[str, Any]:
    """What TRL would make of a batch, padded as it pads."""
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
    """What a model of small weights gives to every token, nearly."""
    return -math.log(vocab_size)


def _of_status(name: str) -> int:
    """Bytes of this process, as Linux counts them."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}: this benchmark needs Linux")


if __name__ == "__main__":
    main()
