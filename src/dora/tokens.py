"""Tokens: files that only their owner can read, with which one process shows another that it may speak.

Both ends compare in constant time. What passes after that is not encrypted.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from dora.errors import ConfigError

MIN_TOKEN = 16  # characters


def new_token() -> str:
    """256 random bits."""
    return secrets.token_urlsafe(32)


def read_token(file: str | Path, key: str) -> str:
    """The token in a file that the setting `key` names. Raises ConfigError."""
    try:
        token = Path(file).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key} = {str(file)!r}: it cannot be read as ASCII text: {error}") from error
    if len(token) < MIN_TOKEN or not token.isprintable() or " " in token:
        raise ConfigError(
            f"{key} = {str(file)!r}: a token is one line of {MIN_TOKEN} or more characters without "
            "blanks; write one"
        )
    return token


def write_private(file: Path, text: str) -> None:
    """Put a text into a new file for nobody but its owner, in the place of one that is there."""
    file.unlink(missing_ok=True)
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as opened:
        opened.write(text)
