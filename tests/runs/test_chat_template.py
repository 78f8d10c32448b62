"""A run with variables of its chat template: all its prompts have them, and resuming and audits agree."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tests.runs.conftest import StartRun
from tests.runtime.running import dora, query
from tests.runtime.tiny import write_task

from dora.data.tokenizer import Tokenizer

TEMPLATE = "{{ messages[0].content }}{% if enable_thinking is false %};{% endif %}"


def test_all_prompts_of_a_run_have_the_variables_of_its_template(start_run: StartRun, tmp_path: Path) -> None:
    config = write_task(tmp_path)
    (tmp_path / "start" / "chat_template.jinja").write_text(TEMPLATE)
    key = "data.chat_template_kwargs.enable_thinking"
    run = start_run(
        config,
        run__steps=2,
        data__chat_template="true",
        eval__path=tmp_path / "prompts.jsonl",
        eval__num_prompts=2,
        **{key.replace(".", "__"): "false"},
    )
    run.succeed()
    rows = query(run.out, "select distinct prompt_ids from samples")
    decode = Tokenizer(tmp_path / "start").decode
    prompts = {decode(np.frombuffer(ids, np.int32).tolist()) for (ids,) in rows}
    assert prompts
    assert all(prompt.endswith(":;") for prompt in prompts), prompts
    run.audit("--deep", "2")
    assert 'chat_template_kwargs = {"enable_thinking" = false}' in (run.out / "config.toml").read_text()
    resumed = dora("train", "--resume", run.out, "--set", f"{key}=true", "--set", "run.steps=4")
    assert resumed.code == 2
    assert "data.chat_template_kwargs was {'enable_thinking': False} and cannot become" in resumed.err
