"""The contract on real servers, by `make test-vllm VLLM_PYTHON=...` or `make test-sglang SGLANG_PYTHON=...`.

No other run of the tests has it: theirs have servers whose answers are made up, or were recorded.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
from tests.runtime.running import wait_until_gone

from dora.backends.sglang import Sglang
from dora.backends.vllm import Vllm
from dora.backends.vllm_lora import VllmLora
from dora.contract.asking import CONFIG, request, weights
from dora.contract.inference import MAX_CONTEXT, MAX_ROWS, InferenceContract
from dora.contract.lora import RANK, lora_weights
from dora.engine.sequence import Completion
from dora.model.folder import save_folder
from dora.model.weights import weight_digest
from dora.runtime.stations import Capabilities
from dora.trainer.logprobs import GroupLogprobs
from dora.trainer.settings import Sample, TrainerSettings

Engine: type[Vllm] | type[Sglang] = Sglang if "SGLANG_PYTHON" in os.environ else Vllm
PYTHON = os.environ["SGLANG_PYTHON" if Engine is Sglang else "VLLM_PYTHON"]
SERVERS: dict[str, Vllm | Sglang] = {}  # by dtype: each takes half a minute to start


class Attached:
    """Made as an adapter is; engines of one dtype use the same server, one after another."""

    capabilities: ClassVar[Capabilities] = Engine.capabilities

    def __new__(cls, *, model: str, dtype: str, **made_with: Any) -> Vllm | Sglang:  # type: ignore[misc]
        if dtype not in SERVERS:
            SERVERS[dtype] = Engine(model=model, dtype=dtype, python=PYTHON, **made_with)
        server = SERVERS[dtype].server
        os.environ[server.product.token_key] = server.token
        return Engine(model=model, dtype=dtype, url=server.url, **made_with)


@pytest.fixture(autouse=True, scope="module")
def servers() -> Iterator[None]:
    yield
    for engine in SERVERS.values():
        engine.close()


@pytest.mark.timeout(300)
class TestReal(InferenceContract):
    """On a CPU."""

    factory = Attached
    tolerance = 1e-3


@pytest.mark.timeout(300)
def test_a_server_ends_with_the_process_of_its_engine(tmp_path: Path) -> None:
    """Killed, that has no time to say so."""
    save_folder(tmp_path / "model", CONFIG, weights(0))
    body = (
        "import time\n"
        f"from {Engine.__module__} import {Engine.__name__} as Engine\n"
        f"engine = Engine(model={str(tmp_path / 'model')!r}, max_rows={MAX_ROWS}, max_context={MAX_CONTEXT},"
        f" version_slots=1, device='cpu', dtype='float32', python={PYTHON!r})\n"
        "print(engine.kernels, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", body], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline().startswith(("vLLM ", "SGLang "))
        below = psutil.Process(owner.pid).children(recursive=True)
        assert len(below) >= 3, "a keeper, a server, its engine"
        owner.send_signal(signal.SIGKILL)
    assert wait_until_gone(below, timeout_s=30) == []


@pytest.mark.timeout(300)
def test_what_was_given_up_never_meets_other_weights(tmp_path: Path) -> None:
    """Many rounds of it: requests are given up at once, and the next version is loaded."""
    save_folder(tmp_path / "model", CONFIG, weights(0))
    engine = Attached(
        model=str(tmp_path / "model"),
        max_rows=MAX_ROWS,
        max_context=MAX_CONTEXT,
        version_slots=1,
        device="cpu",
        dtype="float32",
    )
    for version in 10 * [0, 1]:
        engine.load(version, weights(version))
        engine.submit([request(number, version=version) for number in range(2 * MAX_ROWS)])
        engine.step()
        engine.abort([request(number).id for number in range(1, 2 * MAX_ROWS)])
        answers: list[Completion] = []
        while not answers:
            answers = engine.step()
        assert [answer.version for answer in answers] == [version]
        engine.drop(version)


@pytest.mark.timeout(300)
@pytest.mark.skipif(Engine is Sglang, reason="its adapter holds one version")
def test_versions_that_lora_trains_generate_side_by_side_in_one_server(tmp_path: Path) -> None:
    """Each answer has the log-probs of its version's merged weights, whichever are loaded meanwhile."""
    save_folder(tmp_path / "model", CONFIG, weights(0))
    engine = VllmLora(
        model=str(tmp_path / "model"),
        max_rows=MAX_ROWS,
        max_context=MAX_CONTEXT,
        version_slots=3,
        device="cpu",
        dtype="float32",
        python=PYTHON,
        rank=RANK,
    )
    plain = GroupLogprobs(CONFIG, TrainerSettings(lr=0.0, num_steps=1), "cpu")
    answers: list[Completion] = []
    for version in range(8):
        if version >= 3:
            while (version - 3) in {id.sibling for id in engine.progress()}:
                answers += engine.step()
            engine.drop(version - 3)
        assert engine.load(version, lora_weights(version)) == weight_digest(lora_weights(version))
        engine.submit([request(version, version=version, max_tokens=40)])
        answers += engine.step()
    while engine.can_step:
        answers += engine.step()
    engine.close()
    assert {answer.id.sibling: answer.version for answer in answers} == {
        version: version for version in range(8)
    }
    for answer in answers:
        plain.use(lora_weights(answer.version))
        told = plain([Sample(answer.prompt_ids, answer.token_ids, [0.0] * len(answer.token_ids), 0.0)])
        assert answer.logprobs == pytest.approx(told[0].tolist(), abs=1e-3)
