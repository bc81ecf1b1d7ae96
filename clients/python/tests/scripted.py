"""A model that gives answers by rote: each of its tokens says which comes next, whatever stands before it."""

from __future__ import annotations

import json

import numpy as np
import pytest

from models import read_model, write_model
from rollout_client import ServerProcess
from serving import FIXTURES, SMALL_CACHE

LIKE = FIXTURES / "llama"
# How much likelier the scripted token is than any other, and the first answer than the others.
CERTAIN, PREFERRED = 50.0, 10.0


@pytest.fixture(scope="module")
def scripted_model(request, tmp_path_factory):
    """A model that gives the module's `ANSWERS`, with its `TEMPLATE`; and the first token of each answer, by name."""
    answers, directory = request.module.ANSWERS, tmp_path_factory.mktemp("models") / "scripted"
    starts = write_scripted(directory, request.module.TEMPLATE, list(answers.values()))
    return directory, dict(zip(answers, starts, strict=True))


@pytest.fixture(scope="module")
def scripted(binary, scripted_model):
    """A server of the module's model, and the first token of each answer, by name."""
    directory, starts = scripted_model
    with ServerProcess(binary, directory, [*SMALL_CACHE, "--mem-util", "0.2"]) as server:
        yield server, starts


def biased(starts, name):
    """The members of a body that make the model give this answer."""
    return {"temperature": 0, "logit_bias": {str(starts[name]): 2 * PREFERRED}}


def write_scripted(directory, template, answers, special=()):
    """A checkpoint whose generation prompt, which ends with a line feed, is followed by one of `answers`: the first, or
    one whose token gets a logit bias of 2 * `PREFERRED`. An answer is a list of texts, each of which becomes a token;
    those in `special` are special ones. Returns the first token of each answer.

    Attention and MLP add nothing, so that a token's hidden state is its embedding: a dimension of its own.
    """
    state = {name: array.astype(np.float32) for name, array in read_model(LIKE).items()}
    tokenizer = json.loads((LIKE / "tokenizer.json").read_text())
    vocabulary, size = tokenizer["model"]["vocab"], state["model.embed_tokens.weight"].shape[1]
    texts = [text for answer in answers for text in answer]
    ids = [len(vocabulary) + i for i in range(len(texts))]
    rows = -(-(len(vocabulary) + len(texts)) // 64) * 64
    assert len(set(texts)) == len(texts) < size - 1, "each text is a token of its own, with a dimension of its own"
    for name, array in state.items():
        if "o_proj" in name or "down_proj" in name:
            array[:] = 0
    embeddings, head = np.zeros((2, rows, size), np.float32)
    line_feed, end = vocabulary["Ċ"], vocabulary["<|im_end|>"]
    dimensions = {token: i + 1 for i, token in enumerate([line_feed, *ids])}
    embeddings[:, 0] = 1
    for token, dimension in dimensions.items():
        embeddings[token] = np.eye(size)[dimension]
    unit = 1 / np.sqrt(size)
    starts, last = [], 0
    for i, answer in enumerate(answers):
        chain = ids[last : last + len(answer)]
        last += len(answer)
        starts.append(chain[0])
        head[chain[0], dimensions[line_feed]] = (CERTAIN - (PREFERRED if i else 0)) * unit
        for token, following in zip(chain, [*chain[1:], end], strict=True):
            head[following, dimensions[token]] = CERTAIN * unit
    state |= {"model.embed_tokens.weight": embeddings, "lm_head.weight": head}
    state["model.norm.weight"][:] = 1
    original = read_model(LIKE)
    write_model(directory, LIKE, {name: array.astype(original[name].dtype) for name, array in state.items()})
    config = json.loads((directory / "config.json").read_text()) | {"vocab_size": rows}
    (directory / "config.json").write_text(json.dumps(config))
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [{"id": i, "content": t, **plain, "special": t in special} for i, t in zip(ids, texts, strict=True)]
    tokenizer["added_tokens"] += added
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "chat_template.jinja").write_text(template)
    return starts
