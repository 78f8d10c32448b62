"""The README.md of a checkpoint, in the Hugging Face Hub's format: what trained it, and how to load it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- dora-rl
- reinforcement-learning
---

# {model}, after {steps}

[DORA-RL](https://arxiv.org/abs/2604.26256) {version} trained this model with reinforcement learning.

| | |
|---|---|
{rows}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = (kind.from_pretrained("FOLDER") for kind in (AutoModelForCausalLM, AutoTokenizer))
```

`optimizer.pt` and `core.json` are for DORA-RL, which continues the run with them.{adapter}
"""


def model_card(config: Mapping[str, Any], step: int, version: str) -> str:
    """The card of a checkpoint after `step` steps; `config` is the resolved one, `version` DORA-RL's.

    Keys without effect are missing in it. Paths are shortened to their last part: the card may be published.
    """
    algorithm, trainer, sampling = config["algorithm"], config["trainer"], config["sampling"]
    rules, distillation = config["orchestrator"], config.get("distillation", {})
    tasks = config.get("reward_task", ())
    sources = config.get("source") or [config["data"]]
    rewards = [config.get("reward", {}).get("function"), *(task["class"] for task in tasks)]
    loss = [algorithm[key] for key in ("adv_estimator", "policy_loss", "loss_agg_mode") if key in algorithm]
    rows = {
        "initial model": _name(config["model"]["path"]),
        "prompts": ", ".join(_name(source["path"]) for source in sources),
        "environment": _name(config.get("env", {}).get("environment", "")),
        "rewards": ", ".join(_name(reward) for reward in rewards if reward),
        "teachers": ", ".join(map(_name, distillation.get("teachers", ()))),
        "algorithm": ", ".join(map(_name, loss)),
        "steps": f"{step}, each of {trainer['batch_size']} groups of {sampling['group_size']} responses",
        "sampling": f"temperature {sampling['temperature']}, up to {sampling['max_response_length']} tokens",
        "learning rate": str(trainer.get("lr", "")),
        "LoRA": f"rank {trainer['lora_rank']}" if trainer.get("lora_rank") else "",
        "policy versions": f"{rules['update_policy']}, staleness at most {rules.get('max_staleness', 0)}",
        "seed": str(config["run"]["seed"]),
    }
    return _CARD.format(
        model=rows["initial model"],
        steps=f"{step:,} step{'' if step == 1 else 's'}",
        version=version,
        rows="\n".join(f"| {name} | {value} |" for name, value in rows.items() if value),
        adapter=" `adapter` is the adapter for PEFT." if rows["LoRA"] else "",
    )


def _name(path: str) -> str:
    """The last part of a path, also in `file.py:name`."""
    return Path(path).name if path.startswith(("/", ".")) else path
