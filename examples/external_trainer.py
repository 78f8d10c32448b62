"""An external trainer, which shares no code with DORA: PyTorch, transformers and HTTP requests.

    dora serve examples/gcd.toml --out runs/external --set service.trainer=external
    python examples/external_trainer.py runs/external --model examples/gcd-start

Both programs may be restarted at any time: the other one waits, and continues at the next step.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterator
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import torch
from safetensors.torch import load, save
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

FIELDS = "prompt_ids,token_ids,logprobs,loss_mask,advantage,version"


class WrongStep(Exception):
    """The run is at another step: it was resumed, or another trainer published this one."""


class Run:
    """The service of a run, whose address is in a file that exists while the service runs."""

    def __init__(self, folder: Path, timeout_s: float) -> None:
        self._file, self._timeout_s = folder / "service.json", timeout_s
        if not self._file.exists():
            print(f"waiting for {self._file}", flush=True)

    def request(self, path: str, body: bytes | None = None, **query: object) -> HTTPResponse:
        """GET, or PUT of a body; retried while the run is starting, busy or crashed. Raises WrongStep."""
        deadline_s = time.monotonic() + self._timeout_s
        while True:
            try:
                address = json.loads(self._file.read_text())
                url, bearer = f"{address['url']}{path}?{urlencode(query)}", f"Bearer {address['token']}"
                method = "GET" if body is None else "PUT"
                response: HTTPResponse = urlopen(Request(url, body, {"Authorization": bearer}, method=method))
                return response
            except HTTPError as error:
                reason = error.read().decode()
                if error.code in (409, 410):
                    raise WrongStep(reason) from error
                if error.code not in (401, 404, 429, 503):
                    raise SystemExit(f"{path}: {reason}") from error
            except (OSError, ValueError) as error:  # the service does not listen, or the file is missing
                reason = str(error)
            if time.monotonic() > deadline_s:
                raise SystemExit(
                    f"{path}: no response for {self._timeout_s:g} s ({reason}); start the run with dora serve"
                )
            time.sleep(0.2)

    def training(self) -> dict[str, Any]:
        """The next step and the settings of training."""
        rules: dict[str, Any] = json.load(self.request("/v1/training"))
        return rules

    def weights(self, version: int) -> dict[str, Tensor]:
        return load(self.request(f"/v1/weights/{version}").read())

    def groups(self, step: int) -> Iterator[dict[str, Any]]:
        """The fields of each group of a step's batch, as soon as the group is committed to the step."""
        num_groups, is_complete = 0, False
        while not is_complete:
            for line in self.request(f"/v1/batches/{step}", fields=FIELDS, after=num_groups):
                content = json.loads(line)
                if "group" in content:
                    num_groups += 1
                    yield content["fields"]
                else:
                    is_complete = content["is_complete"]

    def publish(self, version: int, weights: dict[str, Tensor], **metrics: float) -> str:
        """End the step; returns the digest of the published version."""
        body = save(weights)
        sha256 = hashlib.sha256(body).hexdigest()
        response = self.request(f"/v1/weights/{version}", body, sha256=sha256, metrics=json.dumps(metrics))
        digest: str = json.load(response)["digest"]
        return digest


def loss_of(model: Any, group: dict[str, Any], rules: dict[str, Any]) -> tuple[Tensor, int]:
    """PPO's clipped loss, summed over the sampled tokens of a group; and the number of these tokens."""
    prompts, responses = group["prompt_ids"], group["token_ids"]
    shape = len(responses), max(len(p) + len(r) for p, r in zip(prompts, responses, strict=True))
    ids = torch.zeros(shape, dtype=torch.long)  # padded on the right, where causal attention ignores it
    rollout_logprobs, mask = torch.zeros(shape), torch.zeros(shape)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        start, end = len(prompt), len(prompt) + len(response)
        ids[row, :end] = torch.tensor(prompt + response)
        rollout_logprobs[row, start:end] = torch.tensor(group["logprobs"][row])
        mask[row, start:end] = torch.tensor(group["loss_mask"][row] or [1] * len(response))
    logits = model(input_ids=ids).logits[:, :-1] / rules["temperature"]
    logprobs = -cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(ids), -1)
    mask, advantages = mask[:, 1:], torch.tensor(group["advantage"])[:, None]
    ratio = torch.exp((logprobs - rollout_logprobs[:, 1:]) * mask)
    algorithm = rules["algorithm"]
    clipped = ratio.clamp(1 - algorithm["clip_ratio_low"], 1 + algorithm["clip_ratio_high"])
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    return -(objective * mask).sum(), int(mask.sum())


def train(model: Any, optimizer: torch.optim.Optimizer, run: Run, rules: dict[str, Any]) -> dict[str, float]:
    """One step. Gradients are summed as groups arrive, and divided by the number of tokens at the end."""
    num_tokens, total, versions = 0, 0.0, []
    optimizer.zero_grad()
    for group in run.groups(rules["step"]):
        loss, num = loss_of(model, group, rules)
        loss.backward()
        num_tokens, total = num_tokens + num, total + loss.item()
        versions += group["version"]
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= num_tokens
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), rules["trainer"]["max_grad_norm"])
    optimizer.step()
    return {"loss": total / num_tokens, "grad_norm": float(norm), "oldest": rules["step"] - min(versions)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run of `dora serve`")
    parser.add_argument("--model", required=True, help="Hugging Face folder of the run's initial model")
    parser.add_argument("--steps", type=int, default=sys.maxsize, help="number of steps to train")
    parser.add_argument("--timeout", type=float, default=120.0, help="time to wait for the run (s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    run, step = Run(options.run, options.timeout), None
    rules = run.training()
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rules["trainer"]["lr"], weight_decay=0.0)
    end = min(rules["num_steps"], rules["step"] + options.steps)
    while rules["step"] < end:
        if rules["step"] != step:
            model.load_state_dict(run.weights(rules["step"]), strict=False)  # the file has no tied head
        step = rules["step"]
        try:
            metrics = train(model, optimizer, run, rules)
            weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
            digest = run.publish(step + 1, weights, **metrics)
            print(f"version {step + 1} ({digest}): loss {metrics['loss']:.4f}", flush=True)
            step = rules["step"] = step + 1
        except (WrongStep, HTTPException, OSError):  # the run crashed, or was resumed from an earlier step
            rules, step = run.training(), None


if __name__ == "__main__":
    main()
