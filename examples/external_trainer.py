"""A trainer that shares no code with DORA: plain PyTorch and transformers, and HTTP in between.

    dora serve examples/gcd.toml --out runs/outside --set service.trainer=external
    python examples/external_trainer.py runs/outside --model examples/gcd-start

Either may be ended and started again at any time: the other waits, and goes on at the step that is next.
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


class Behind(Exception):
    """The run is at another step: it was resumed, or another trainer was faster."""


class Run:
    """A run's service, found through the file that it keeps while it goes."""

    def __init__(self, folder: Path, patience_s: float) -> None:
        self._file, self._patience_s = folder / "service.json", patience_s
        if not self._file.exists():
            print(f"waiting for {self._file}", flush=True)

    def call(self, path: str, body: bytes | None = None, **query: object) -> HTTPResponse:
        """GET, or PUT of a body. What is not there yet is asked for again, and so is a run that died."""
        deadline_s = time.monotonic() + self._patience_s
        while True:
            try:
                found = json.loads(self._file.read_text())
                url, bearer = f"{found['url']}{path}?{urlencode(query)}", f"Bearer {found['token']}"
                method = "GET" if body is None else "PUT"
                response: HTTPResponse = urlopen(Request(url, body, {"Authorization": bearer}, method=method))
                return response
            except HTTPError as error:
                why = error.read().decode()
                if error.code in (409, 410):
                    raise Behind(why) from error
                if error.code not in (401, 404, 429, 503):
                    raise SystemExit(f"{path}: {why}") from error
            except (OSError, ValueError) as error:  # nobody listens there, or the file is not there
                why = str(error)
            if time.monotonic() > deadline_s:
                gone = f"no answer for {self._patience_s:g} s ({why}); start the run with dora serve"
                raise SystemExit(f"{path}: {gone}")
            time.sleep(0.2)

    def training(self) -> dict[str, Any]:
        """The next step, and the rules of training."""
        rules: dict[str, Any] = json.load(self.call("/v1/training"))
        return rules

    def weights(self, version: int) -> dict[str, Tensor]:
        return load(self.call(f"/v1/weights/{version}").read())

    def groups(self, step: int) -> Iterator[dict[str, Any]]:
        """The fields of each group of a step's batch, as they are finished."""
        num_groups, is_whole = 0, False
        while not is_whole:
            for line in self.call(f"/v1/batches/{step}", fields=FIELDS, after=num_groups):
                found = json.loads(line)
                if "group" in found:
                    num_groups += 1
                    yield found["fields"]
                else:
                    is_whole = found["is_whole"]

    def publish(self, version: int, weights: dict[str, Tensor], **metrics: float) -> str:
        """End the step; the digest of what the engines hold from now on."""
        body = save(weights)
        sha256 = hashlib.sha256(body).hexdigest()
        response = self.call(f"/v1/weights/{version}", body, sha256=sha256, metrics=json.dumps(metrics))
        digest: str = json.load(response)["digest"]
        return digest


def loss_of(model: Any, group: dict[str, Any], rules: dict[str, Any]) -> tuple[Tensor, int]:
    """PPO's clipped loss, summed over the sampled tokens of a group; and how many these are."""
    prompts, answers = group["prompt_ids"], group["token_ids"]
    longest = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    ids = torch.zeros(
        len(answers), longest, dtype=torch.long
    )  # padded at the right: causal, so it is not seen
    behaviour, mask = torch.zeros(len(answers), longest), torch.zeros(len(answers), longest)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        start, end = len(prompt), len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        behaviour[row, start:end] = torch.tensor(group["logprobs"][row])
        mask[row, start:end] = torch.tensor(group["loss_mask"][row] or [1.0] * len(answer), dtype=torch.float)
    logits = model(input_ids=ids).logits[:, :-1] / rules["temperature"]
    logprobs = -cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(ids), -1)
    mask, advantages = mask[:, 1:], torch.tensor(group["advantage"])[:, None]
    ratio = torch.exp((logprobs - behaviour[:, 1:]) * mask)
    clip = rules["algorithm"]
    clipped = ratio.clamp(1 - clip["clip_ratio_low"], 1 + clip["clip_ratio_high"])
    gains = torch.minimum(ratio * advantages, clipped * advantages)
    return -(gains * mask).sum(), int(mask.sum())


def train(model: Any, optimizer: torch.optim.Optimizer, run: Run, rules: dict[str, Any]) -> dict[str, float]:
    """One step: gradients are summed while the batch still fills up, and divided by its tokens at the end."""
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
    parser.add_argument("--model", required=True, help="Hugging Face folder that the run began with")
    parser.add_argument("--steps", type=int, default=sys.maxsize, help="end after so many steps")
    parser.add_argument("--patience", type=float, default=120.0, help="wait so long for the run (s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    run, step = Run(options.run, options.patience), None
    rules = run.training()
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rules["trainer"]["lr"], weight_decay=0.0)
    end = min(rules["num_steps"], rules["step"] + options.steps)
    while rules["step"] < end:
        if rules["step"] != step:
            model.load_state_dict(run.weights(rules["step"]), strict=False)  # a tied head is not in the file
        step = rules["step"]
        try:
            metrics = train(model, optimizer, run, rules)
            weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
            digest = run.publish(step + 1, weights, **metrics)
            print(f"version {step + 1} ({digest}): loss {metrics['loss']:.4f}", flush=True)
            step = rules["step"] = step + 1
        except (Behind, HTTPException, OSError):  # the run has died, or goes on from an earlier step
            rules, step = run.training(), None


if __name__ == "__main__":
    main()
