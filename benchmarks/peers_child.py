"""TRL in its own environment, for `peers.py`: the demo's task on GRPOTrainer or AsyncGRPOTrainer.

    PYTHON peers_child.py KIND OUT '{"model": folder, ...}'

KIND is sync (transformers generates), sync_vllm or async (a vLLM server generates). The first line of
OUT/log.jsonl is {"began": time}, and one line for each step follows. OUT/step-N is the model after N steps.
TRL is unmodified, except for what a CPU lacks: weights are transferred in a file instead of by NCCL, SDPA
replaces the flash-attention kernel, and there is no table of FLOP/s.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.request
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dora.data import gcd
from dora.rewards import gcd as gcd_rewards

TEMPLATE = "{{ messages[0]['content'] }}"  # the model reads the bare prompt


def reward(prompts: list[Any], completions: list[Any], **row: Any) -> list[float]:
    """The demo's reward. A text may be a conversation of one message."""
    pairs = zip(map(_text, prompts), map(_text, completions), strict=True)
    return [gcd_rewards.reward(prompt, completion) for prompt, completion in pairs]


def _text(given: Any) -> str:
    return given if isinstance(given, str) else given[0]["content"]


class Server:
    """A vLLM server that loads weights from a file in `folder`."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url, self._folder, self._count = url, folder, 0

    def post(self, path: str, content: Any = None) -> Any:
        data = json.dumps({} if content is None else content).encode()
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.loads(answer.read() or b"{}")

    def load_weights(self, named: Iterator[tuple[str, Any]]) -> None:
        """Load weights, named as in a checkpoint, into the server."""
        from safetensors.torch import save_file

        path = self._folder / "weights.safetensors"
        save_file({name: tensor.detach().contiguous() for name, tensor in named}, path)
        self.post("/collective_rpc", {"method": "load_file", "args": [str(path)]})

    def answers(self, model: str, prompts: list[list[int]], each: int, max_tokens: int) -> list[Any]:
        """`each` answers to each prompt, in order, at temperature 1."""
        sampling = {"n": each, "temperature": 1.0, "max_tokens": max_tokens, "logprobs": 0}
        body = {"model": model, "prompt": prompts, "return_token_ids": True, **sampling}
        choices = self.post("/v1/completions", body)["choices"]
        return sorted(choices, key=lambda choice: choice["index"])


class Transfer:
    """TRL's `WeightTransferProtocol`."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def init_weight_transfer(self) -> None:
        pass  # a file needs no process group

    def pause(self) -> None:
        self._server.post("/pause?mode=keep")

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        self._server.load_weights(iterator)

    def resume(self) -> None:
        self._server.post("/resume")

    def destroy(self) -> None:
        pass


def attend(
    query: Any, key: Any, value: Any, starts_q: Any, starts_k: Any, longest_q: int, longest_k: int,
    *, softmax_scale: float | None, causal: bool, window_size: tuple[int, int],
) -> Any:  # fmt: skip
    """flash_attn_varlen_func with SDPA, for packed sequences [tokens, heads, dim].

    The last query of a sequence attends to all its keys.
    """
    import torch

    assert causal, "only causal attention without a window is implemented"
    assert window_size == (-1, -1), "only causal attention without a window is implemented"
    outs, mask = [], torch.ones(longest_q, longest_k, dtype=torch.bool).tril()
    ends = zip(starts_q.tolist()[1:], starts_k.tolist()[1:], strict=True)
    begin_q = begin_k = 0
    for end_q, end_k in ends:
        q, k, v = (
            x.transpose(0, 1)[None] for x in (query[begin_q:end_q], key[begin_k:end_k], value[begin_k:end_k])
        )
        num_q, num_k = end_q - begin_q, end_k - begin_k
        allowed = None if num_q == num_k else mask.new_ones(num_q, num_k).tril(num_k - num_q)
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=allowed, is_causal=allowed is None, scale=softmax_scale, enable_gqa=True
        )
        outs.append(out[0].transpose(0, 1))
        begin_q, begin_k = end_q, end_k
    return torch.cat(outs)


def dataset(kind: str) -> Any:
    """The demo's prompts; as conversations for AsyncGRPOTrainer, which accepts nothing else."""
    from datasets import Dataset

    prompts: list[Any] = [row["prompt"] for row in gcd.training_rows()]
    if kind == "async":
        prompts = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return Dataset.from_dict({"prompt": prompts})


def arguments(given: dict[str, Any], out: Path) -> dict[str, Any]:
    """Arguments of both trainers: the demo's settings, without saving and reporting."""
    return {
        "output_dir": str(out),
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": given["micro_batch"],
        "gradient_accumulation_steps": given["batch"] // given["micro_batch"],
        "num_generations": given["group"],
        "max_completion_length": given["max_tokens"],
        "temperature": 1.0,
        "learning_rate": given["lr"],
        "warmup_steps": given["warmup_steps"],
        "lr_scheduler_type": "linear",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "epsilon": 0.2,
        "max_steps": given["steps"],
        "seed": given["seed"],
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def make_sync(kind: str, given: dict[str, Any], common: dict[str, Any]) -> Any:
    """GRPOTrainer, which generates with transformers or with a server that loads each step's weights."""
    trl: Any = import_module("trl")
    server = Server(given.get("url", ""), Path(common["args"]["output_dir"]))

    def roll_out(prompts: list[str], trainer: Any) -> dict[str, Any]:
        server.load_weights(trainer.model.named_parameters())
        ids = trainer.processing_class(prompts)["input_ids"]
        choices = server.answers(given["model"], ids[:: given["group"]], given["group"], given["max_tokens"])
        return {
            "prompt_ids": ids,
            "completion_ids": [choice["token_ids"] for choice in choices],
            "logprobs": [choice["logprobs"]["token_logprobs"] for choice in choices],
        }

    from_server = {"rollout_func": roll_out} if kind == "sync_vllm" else {}
    args = trl.GRPOConfig(**common.pop("args"), **given.get("trl", {}))
    return trl.GRPOTrainer(args=args, **common, **from_server)


def make_async(given: dict[str, Any], common: dict[str, Any]) -> Any:
    """AsyncGRPOTrainer, with replacements for what a CPU lacks."""
    home = "trl.experimental.async_grpo"
    trainer: Any = import_module(f"{home}.async_grpo_trainer")
    worker: Any = import_module(f"{home}.async_rollout_worker")
    packing: Any = import_module(f"{home}.packing")
    worker.is_vllm_available = lambda *_: True  # the server has its own environment
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attend)
    trainer.get_peak_flops_per_device = lambda *_: None  # no FLOP/s utilisation is logged
    tokenizer = common["processing_class"]
    tokenizer.chat_template = TEMPLATE
    tokenizer.response_template = {}  # answers are plain texts without tool calls
    args = import_module(home).AsyncGRPOConfig(
        **common.pop("args"),
        token_budget=0,
        max_staleness=given["max_staleness"],
        vllm_server_base_url=given["url"],
    )
    server = Server(given["url"], Path(args.output_dir))
    return trainer.AsyncGRPOTrainer(args=args, **common, weight_transfer=Transfer(server))


def make_logger(out: Path, save_every: int) -> Any:
    """A callback that writes the log and the models."""
    from transformers import TrainerCallback

    log = (out / "log.jsonl").open("w", encoding="utf-8")

    def write(**line: Any) -> None:
        print(json.dumps(line), file=log, flush=True)

    class LogCallback(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            write(began=time.time())

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % save_every == 0:
                kwargs["model"].save_pretrained(out / f"step-{state.global_step}")

        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            numbers = {key: value for key, value in kwargs["logs"].items() if value is not None}
            if "reward" in numbers:
                write(step=state.global_step, t=time.time(), **numbers)

    return LogCallback()


def main() -> None:
    os.dup2(2, 1)
    kind, out, given = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    import torch
    from transformers import AutoTokenizer

    torch.set_num_threads(given["threads"])
    common = {
        "args": arguments(given, out),
        "model": given["model"],
        "reward_funcs": reward,
        "train_dataset": dataset(kind),
        "processing_class": AutoTokenizer.from_pretrained(given["model"], padding_side="left"),
    }
    trainer = make_async(given, common) if kind == "async" else make_sync(kind, given, common)
    trainer.add_callback(
        make_logger(out, given["save_every"])
    )  # last, so that the other callbacks have begun
    trainer.train()


if __name__ == "__main__":
    main()
