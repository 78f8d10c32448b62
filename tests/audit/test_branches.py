"""Branches of a sample are a tree of its tokens."""

from __future__ import annotations

import numpy as np
import pytest

from dora.audit.samples import AuditedSample, SampleAudit

PROMPT, TOKENS = np.array([1, 2], np.int32), np.array([5, 6, 3, 7], np.int32)
MASK = np.array([1, 1, 0, 1], np.uint8)


def findings(branches: str, mask: np.ndarray = MASK) -> list[str]:
    audit = SampleAudit(None, None)
    logprobs = np.zeros(4, np.float32)
    row = AuditedSample("0/0", 0, PROMPT, TOKENS, logprobs, mask, branches, None, None, None, None, None, "")
    audit._check_branches("sample", row)
    return audit.findings


@pytest.mark.parametrize(
    ("branches", "finding"),
    [
        ("[[4, 3]]", ""),
        ("[[3, 0], [4, 2]]", ""),
        ("[[2, 1]]", "no tree"),
        ("[[4, 5]]", "no tree"),
        ("[[6, 1]]", "no tree"),
        ("[[4, 1], [3, 1]]", "no tree"),
        ("[[5, -1]]", "no tree"),
        ("[[4]]", "cannot be read"),
        ("4", "cannot be read"),
    ],
)
def test_branches_that_are_no_tree_are_found(branches: str, finding: str) -> None:
    found = findings(branches)
    assert [finding in each for each in found] == ([True] if finding else [])


def test_a_branch_without_a_sampled_token_is_found() -> None:
    assert "without a sampled token" in "".join(findings("[[4, 3]]", np.array([1, 1, 0, 0], np.uint8)))
