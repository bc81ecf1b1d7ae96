"""Random texts in the tokens of Qwen v1, against tiktoken's algorithm: pieces by the pattern, pairs by their ranks."""

from __future__ import annotations

import base64
import sys
import unicodedata

import numpy as np

from rollout_client import ServerProcess
from serving import FIXTURES, SMALL_CACHE
from vllm_answers import ask

sys.path.append(str(FIXTURES))

import make_qwen_v1_fixtures as qwen_v1

TEXTS = 10_000
SEED = 20
# Newer versions of Unicode have letters that older ones lack; surrogates cannot be encoded.
UNKNOWN = ("Cn", "Cs")


def random_text(rng):
    """Words, digits, spaces and special tokens, with any characters between them that the Unicode of each side has."""
    characters = (chr(point) for point in rng.integers(1, 0x2FA20, rng.integers(0, 20)))
    known = "".join(c for c in characters if unicodedata.category(c) not in UNKNOWN)
    return qwen_v1.random_text(rng) + known + qwen_v1.random_text(rng)


def test_random_texts_have_the_ids_of_tiktokens_algorithm(binary):
    print("seed", SEED)
    rng = np.random.default_rng(SEED)
    lines = (qwen_v1.DIRECTORY / "qwen.tiktoken").read_text().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}
    texts = [random_text(rng) for _ in range(TEXTS)]
    with ServerProcess(binary, FIXTURES / "qwen_v1", [*SMALL_CACHE, "--mem-util", "0.2"]) as server:
        for text in texts:
            expected = qwen_v1.encode(text, ranks)
            assert ask(server.http_address, "POST", "/tokenize", {"prompt": text}).body["tokens"] == expected, text
            again = ask(server.http_address, "POST", "/detokenize", {"tokens": expected}).body["prompt"]
            assert again == unicodedata.normalize("NFC", text)
