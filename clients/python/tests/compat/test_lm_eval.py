"""lm-eval with a task of its own: `local-completions` for both kinds of requests, `local-chat-completions`."""

from __future__ import annotations

import json

import lm_eval
import numpy as np
import pytest
from lm_eval.tasks import TaskManager

from rollout_client import ServerProcess
from serving import FIXTURES, SMALL_CACHE, assert_idle

MODEL = FIXTURES / "llama"
QUESTIONS = [
    {"question": "The sea is", "choices": [" blue", " of bread"], "answer": 0},
    {"question": "One and two make", "choices": [" three", " green"], "answer": 0},
]
CHOICE = """
task: choice
dataset_path: json
dataset_kwargs: {data_files: {test: QUESTIONS}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
target_delimiter: ""
metric_list: [{metric: acc}]
"""
TEXT = """
task: text
dataset_path: json
dataset_kwargs: {data_files: {test: QUESTIONS}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match}]
"""


@pytest.fixture(scope="module")
def tiny(binary):
    """A server of a model whose tokenizer lm-eval can read from its directory."""
    with ServerProcess(binary, MODEL, [*SMALL_CACHE, "--mem-util", "0.2"]) as server:
        yield server
        assert_idle(server.client)


@pytest.fixture
def tasks(tmp_path):
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    for name, text in (("choice", CHOICE), ("text", TEXT)):
        (tmp_path / f"{name}.yaml").write_text(text.replace("QUESTIONS", str(questions)))
    return TaskManager(include_path=str(tmp_path), include_defaults=False)


def evaluate(tasks, name, kind, **arguments):
    """The samples that lm-eval reports, in the order of the questions."""
    results = lm_eval.simple_evaluate(
        model=kind,
        model_args={"max_retries": 1, **arguments},
        tasks=[name],
        task_manager=tasks,
        bootstrap_iters=0,
        log_samples=True,
        apply_chat_template=kind == "local-chat-completions",
    )
    return sorted(results["samples"][name], key=lambda sample: sample["doc_id"])


@pytest.mark.parametrize("concurrency", [1, 4])
def test_the_likelihoods_of_choices(tiny, tasks, concurrency):
    """The sums are those of the log-probabilities that gRPC's Score has."""
    samples = evaluate(
        tasks,
        "choice",
        "local-completions",
        model=str(MODEL),
        base_url=f"http://{tiny.http_address}/v1/completions",
        num_concurrent=concurrency,
    )
    for sample, question in zip(samples, QUESTIONS, strict=True):
        for (given, _), choice in zip(sample["filtered_resps"], question["choices"], strict=True):
            context, whole = (tokens(tiny, text) for text in (question["question"], question["question"] + choice))
            (score,) = tiny.client.score([whole])
            assert float(given) == pytest.approx(np.sum(score.raw_logprobs[len(context) :]), abs=1e-4)


def tokens(server, text):
    from vllm_answers import ask

    return ask(server.http_address, "POST", "/tokenize", {"prompt": text}).body["tokens"]


def test_texts(smollm2, tasks):
    samples = evaluate(
        tasks,
        "text",
        "local-completions",
        model="smollm2",
        base_url=f"{smollm2}/v1/completions",
        tokenizer_backend=None,
        tokenized_requests=False,
        eos_string="<|im_end|>",
        num_concurrent=2,
    )
    assert all(sample["resps"][0][0] and "\n" not in sample["resps"][0][0] for sample in samples)


def test_chats(smollm2, tasks):
    samples = evaluate(
        tasks,
        "text",
        "local-chat-completions",
        model="smollm2",
        base_url=f"{smollm2}/v1/chat/completions",
        num_concurrent=2,
    )
    assert all(sample["resps"][0][0] for sample in samples)


def test_the_servers_tokenizer(tiny, tasks):
    """lm-eval finds `/tokenizer_info`, and needs no files of the model then."""
    url = f"http://{tiny.http_address}/v1/completions"
    found = evaluate(tasks, "choice", "local-completions", model=str(MODEL), base_url=url, tokenizer_backend="remote")
    given = evaluate(
        tasks, "choice", "local-completions", model=str(MODEL), base_url=url, tokenizer_backend="huggingface"
    )
    assert [sample["resps"] for sample in found] == [sample["resps"] for sample in given]
