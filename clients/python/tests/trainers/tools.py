"""A tool, a chat template that shows it, and completions that always call it."""

from __future__ import annotations

from pathlib import Path

import trl

CHAT_TEMPLATE = Path(trl.__file__).with_name("chat_templates").joinpath("qwen2_5.jinja").read_text()
# What a random model does not say by itself.
CALL = r'<tool_call>\n\{"name": "add", "arguments": \{"a": [1-9], "b": [1-9]\}\}\n</tool_call>'


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first.
        b: the second.

    Returns:
        Their sum.
    """
    return a + b
