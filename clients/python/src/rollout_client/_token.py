"""Reads the token file of the command line and of the trainers' plug-ins."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import InvalidArgument

_CONTROL_ROLE = "control"


def read_token(path: str | os.PathLike[str]) -> str:
    """The token in a file: its only word, or, as in the server's `--auth-token-file`, the token with the most rights,
    which may be followed by its tenant.

    Raises:
        InvalidArgument: the file cannot be read, or has no token.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"token file {path}: {getattr(error, 'strerror', None) or error}") from None
    words = [line.split() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    words.sort(key=lambda line: line[0] != _CONTROL_ROLE)
    match words:
        case [[token], *_] | [[_, token], *_] | [[_, token, _], *_]:
            return token
    raise InvalidArgument(f"token file {path}: expected a token, alone or behind its role")
