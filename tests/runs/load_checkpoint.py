"""Load a checkpoint as other projects do: `python load_checkpoint.py BASE CHECKPOINT`, without DORA-RL.

lm-eval answers two questions with it, and PEFT adds its adapter to the base model.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from lm_eval import simple_evaluate  # type: ignore[import-not-found]
from lm_eval.tasks import TaskManager  # type: ignore[import-not-found]
from peft import PeftModel  # type: ignore[import-not-found]
from transformers import AutoModelForCausalLM, AutoTokenizer

QUESTIONS = [{"prompt": "12,30:", "choices": ["0", "7"], "right": right} for right in (0, 1)]
TASK = """
task: sevens
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: multiple_choice
doc_to_text: prompt
doc_to_choice: choices
doc_to_target: right
target_delimiter: ""
metric_list:
  - metric: acc
"""


def evaluate(checkpoint: str, folder: Path) -> float:
    """The accuracy that lm-eval reports; one of the two questions is right, whatever the model answers."""
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    (folder / "sevens.yaml").write_text(TASK.format(file=data))
    tasks = TaskManager(include_path=str(folder))
    found = simple_evaluate(
        model="hf", model_args={"pretrained": checkpoint, "device": "cpu", "dtype": "float32"},
        tasks=["sevens"], task_manager=tasks, bootstrap_iters=0,
    )  # fmt: skip
    return float(found["results"]["sevens"]["acc,none"])


def main(base: str, checkpoint: str) -> None:
    ids = torch.tensor([AutoTokenizer.from_pretrained(checkpoint).encode("12,30:")])
    merged = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)(ids).logits
    start = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    assert (start(ids).logits - merged).abs().max() > 1e-4
    adapted = PeftModel.from_pretrained(start, f"{checkpoint}/adapter")(ids).logits
    assert (adapted - merged).abs().max() < 1e-4
    with tempfile.TemporaryDirectory() as folder:
        print("accuracy", evaluate(checkpoint, Path(folder)))


if __name__ == "__main__":
    main(*sys.argv[1:])
