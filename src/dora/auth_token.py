"""Auth tokens: the secret by which a process authenticates, in a file that only its owner can read.

Both ends compare tokens in constant time. The connection itself is not encrypted.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from dora.atomic_file import write_bytes_atomically
from dora.errors import ConfigError

MIN_LENGTH = 16  # characters


def new_auth_token() -> str:
    """256 random bits."""
    return secrets.token_urlsafe(32)


def read_auth_token(file: str | Path, key: str) -> str:
    """The token in the file that the setting `key` names. Raises ConfigError."""
    try:
        token = Path(file).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key} = {str(file)!r}: cannot be read as ASCII text: {error}") from error
    if len(token) < MIN_LENGTH or not token.isprintable() or " " in token:
        raise ConfigError(
            f"{key} = {str(file)!r}: a token is one line of {MIN_LENGTH} or more characters without "
            "blanks; write one"
        )
    return token


def write_private_file(file: Path, text: str) -> None:
    """Write a file with mode 0600, replacing an existing one. Readers never see a part of it."""
    write_bytes_atomically(file, text.encode(), mode=0o600)
