"""The code blocks of the pages, fenced or indented, and a folder with the files that they name."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from dora.cli.main import app, main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("examples/**/*.md"))]
PROGRAMS = ("dora", "python", "pip", "make", "pytest", "export")
FENCE = re.compile(r"^```(\S*)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?<=\n\n)((?:    .+\n|\n(?=    \S))+)")
SETTING = re.compile(r"[a-z]+\.\w+ = ")


@dataclass(frozen=True)
class Block:
    """A code block; `title` is the file that it is the content of, `line` its first line (from 1)."""

    page: str
    line: int
    language: str
    title: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def of_page(page: Path) -> Iterator[Block]:
    """All blocks of a page, fenced ones first. An indented block gets its language from its first word."""
    name, text = str(page.relative_to(ROOT)), page.read_text(encoding="utf-8")
    for fence in FENCE.finditer(text):
        line = text[: fence.start(3)].count("\n") + 1
        yield Block(name, line, fence[1], fence[2] or "", fence[3])
    rest = FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), text)
    for found in INDENTED.finditer(rest):
        own = re.sub(r"^    ", "", found[1], flags=re.MULTILINE)
        is_settings = SETTING.match(own)
        language = "sh" if own.split()[0] in PROGRAMS else "settings" if is_settings else "text"
        yield Block(name, rest[: found.start()].count("\n") + 1, language, "", own)


BLOCKS = [block for page in PAGES for block in of_page(page)]


def of_language(language: str) -> list[Block]:
    """The blocks of all pages in one language."""
    return [block for block in BLOCKS if block.language == language]


def commands() -> list[tuple[Block, str]]:
    """All command lines, with their continuation lines."""
    found = []
    for block in of_language("sh"):
        lines = block.text.replace("\\\n", " ").splitlines()
        found += [(block, line.strip()) for line in lines if line.strip()]
    return found


def parse(line: str) -> tuple[str, dict[str, Any]]:
    """The command of a `dora` line and its options; an unknown one is an error."""
    command: Any = typer.main.get_command(app)
    _, *rest = shlex.split(line, comments=True)
    name = rest[0]
    while hasattr(command, "commands"):
        command, rest = command.commands[rest[0]], rest[1:]
    return name, command.make_context(name, rest).params


def run(block: Block, names: dict[str, object]) -> dict[str, object]:
    """Execute a Python block; a traceback shows the line of its page."""
    code = compile("\n" * (block.line - 1) + block.text, block.page, "exec")
    exec(code, names)
    return names


def furnish(folder: Path) -> None:
    """Create the files that pages name: the examples, some prompts, and blocks with a title."""
    for name in ("examples", "demo"):
        (folder / name).symlink_to(ROOT / "examples")
    (folder / "benchmarks").symlink_to(ROOT / "benchmarks")
    pairs = [(12, 30, 6), (14, 21, 7), (25, 35, 5), (18, 24, 6)]
    rows = [{"prompt": f"{a},{b}:", "answer": f"{right:02}", "number": a} for a, b, right in pairs]
    asked = [{"question": "What is 6 x 12?", "answer": "6 x 12 = 72 #### 72"}] * 8
    for name, lines in (("prompts", rows), ("test", 64 * rows), ("train", asked)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    checkpoint = folder / "runs" / "a" / "checkpoints" / "step-400"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.symlink_to(ROOT / "examples" / "gcd-start")
    for block in BLOCKS:
        if block.title:
            (folder / block.title).write_text(block.text)
    assert dora("init-model", str(folder / "tiny"), "--tokenizer-from", str(folder / "train.jsonl")) == 0
    (folder / "Qwen3-0.6B").symlink_to(
        "tiny"
    )  # configuration and tokenizer of a model that is not downloaded


def dora(*arguments: str) -> int:
    """Run a command in this process; its exit code."""
    try:
        main(arguments)
    except SystemExit as end:
        return int(end.code or 0)
    return 0
