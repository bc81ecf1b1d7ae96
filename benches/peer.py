#!/usr/bin/env python3
"""Runs one peer in its own Python: takes workloads as lines of JSON on standard input, and answers each with a line.

    .peers/vllm/bin/python benches/peer.py vllm CHECKPOINT
    python benches/peer.py transformers CHECKPOINT cuda

The first line it prints has the peer's version. A line of input is an `Order`. Its answer is {"seconds"}: the wall
time of the whole workload from a cold prefix cache, including the reading of every sampled token's log-probability.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

MAX_MODEL_LEN = 2048
MAX_SEQUENCES = 64
SLOT_TOKENS = 1280
"""Context of a sequence in llama.cpp, which divides its context evenly: 1,024 + 128 tokens and some more."""

Order = dict[str, Any]
"""One workload: prompts (token ids), n, new_tokens, temperature."""
Runner = Callable[[Order], int]
"""Runs a workload and returns how many tokens with log-probabilities it made."""


def vllm(checkpoint: str) -> tuple[str, Runner, Callable[[], object]]:
    """vLLM in process, compiled, through its class `LLM`."""
    import vllm as library  # noqa: PLC0415 only this peer's Python has it

    llm = library.LLM(
        model=checkpoint,
        dtype="bfloat16",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_SEQUENCES,
        skip_tokenizer_init=True,
        disable_log_stats=True,
        seed=0,
    )

    def run(order: Order) -> int:
        sampling = library.SamplingParams(
            n=order["n"],
            temperature=order["temperature"],
            max_tokens=order["new_tokens"],
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in order["prompts"]]
        samples = [s for output in llm.generate(prompts, sampling, use_tqdm=False) for s in output.outputs]
        return sum(len([row[token].logprob for token, row in zip(s.token_ids, s.logprobs)]) for s in samples)  # noqa: B905

    return library.__version__, run, llm.reset_prefix_cache


def transformers(checkpoint: str, device: str = "cpu") -> tuple[str, Runner, Callable[[], object]]:
    """transformers: `generate` with all sequences in one batch. Prompts have equal lengths, so nothing is padded."""
    import torch  # noqa: PLC0415 only this peer's Python has it
    import transformers as library  # noqa: PLC0415

    torch.set_num_threads(os.cpu_count() or 1)
    model = library.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval().to(device)

    class KeepLogprobs(library.LogitsProcessor):
        """Keeps the log-probability of each sampled token, so that only one step's logits are alive at a time."""

        def __init__(self) -> None:
            self.of_step, self.taken = None, []

        def take(self, sampled: torch.Tensor) -> None:
            if self.of_step is not None:
                self.taken.append(self.of_step.gather(1, sampled[:, None])[:, 0])

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            self.take(input_ids[:, -1])
            self.of_step = scores.float().log_softmax(-1)
            return scores

    def run(order: Order) -> int:
        rows = torch.tensor([prompt for prompt in order["prompts"] for _ in range(order["n"])], device=device)
        is_greedy = order["temperature"] == 0
        sampling = {} if is_greedy else {"temperature": order["temperature"], "top_k": 0, "top_p": 1.0}
        keep = KeepLogprobs()
        with torch.inference_mode():
            output = model.generate(
                rows,
                attention_mask=torch.ones_like(rows),
                max_new_tokens=order["new_tokens"],
                min_new_tokens=order["new_tokens"],
                do_sample=not is_greedy,
                eos_token_id=None,
                pad_token_id=0,
                logits_processor=library.LogitsProcessorList([keep]),
                **sampling,
            )
        keep.take(output[:, -1])
        return sum(len(step.tolist()) for step in keep.taken)

    return library.__version__, run, lambda: None


def llama_cpp(binary: str, model: str) -> tuple[str, Runner, Callable[[], object]]:
    """llama.cpp: a llama-server that gets one request for each prompt, all at once."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    threads = str(os.cpu_count() or 1)
    numbers = ["-t", threads, "-tb", threads, "-np", str(MAX_SEQUENCES), "-c", str(MAX_SEQUENCES * SLOT_TOKENS)]
    modes = ["--no-kv-unified", "--cache-ram", "0", "--no-webui", "--no-warmup"]
    server = subprocess.Popen([binary, "-m", model, "--port", str(port), *numbers, *modes], stdout=sys.stderr)

    def post(path: str, body: dict | None) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1800)
        connection.request("POST" if body else "GET", path, json.dumps(body) if body else None)
        response = connection.getresponse()
        text = response.read()
        if response.status != 200:
            raise OSError(f"{path} gave {response.status}: {text[:300]!r}")
        return json.loads(text)

    def is_ready() -> bool:
        if server.poll() is not None:
            raise RuntimeError(f"llama-server ended with {server.returncode}")
        with contextlib.suppress(OSError):
            return post("/health", None) is not None
        return False

    while not is_ready():
        time.sleep(0.05)

    def run(order: Order) -> int:
        def one(prompt: list[int]) -> int:
            body = {
                "prompt": prompt,
                "n_cmpl": order["n"],
                "n_predict": order["new_tokens"],
                "temperature": order["temperature"],
                "samplers": ["temperature"],
                "n_probs": 1,
                "ignore_eos": True,
                "cache_prompt": False,
                "return_tokens": True,
            }
            answers = post("/completion", body)
            answers = answers if isinstance(answers, list) else [answers]
            # The answer leaves out probabilities of bytes that are no whole character. In scripts other than Latin up
            # to 48 of the 128 tokens of a reply lack theirs, although all were computed.
            if any(2 * len(a["completion_probabilities"]) < order["new_tokens"] for a in answers):
                raise RuntimeError("llama-server has left out log-probabilities")
            return sum(a["tokens_predicted"] for a in answers)

        with ThreadPoolExecutor(len(order["prompts"])) as pool:
            return sum(pool.map(one, order["prompts"]))

    told = subprocess.run([binary, "--version"], capture_output=True, text=True, check=False)
    return (told.stderr or told.stdout).splitlines()[0].removeprefix("version: "), run, lambda: None


def mistral_rs(checkpoint: str) -> tuple[str, Runner, Callable[[], object]]:
    """mistral.rs in process and in float32: its bfloat16 takes one and a half to three times as long on a processor.

    It takes texts only. Its tokenizer here has the numerals of the token ids as words, so that it computes the same
    ids as the others. All requests are sent at once as streams, because it handles calls without a stream one at a
    time.
    """
    import mistralrs as library  # noqa: PLC0415 only this peer's Python has it

    config = json.loads(Path(checkpoint, "config.json").read_text())
    # Newer checkpoints have the base frequency in rope_parameters, where mistral.rs does not look.
    config.setdefault("rope_theta", config.get("rope_parameters", {}).get("rope_theta"))
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": {"type": "WordLevel", "vocab": {str(i): i for i in range(config["vocab_size"])}, "unk_token": "0"},
    }
    with tempfile.TemporaryDirectory(prefix="rollout-bench-") as name:
        directory = Path(name)
        (directory / "config.json").write_text(json.dumps(config))
        (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
        (directory / "messages.jinja").write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
        (directory / "model.safetensors").symlink_to(Path(checkpoint, "model.safetensors").resolve())
        runner = library.Runner(
            which=library.Which.Plain(model_id=name, dtype=library.ModelDType.F32),
            max_seqs=MAX_SEQUENCES,
            prefix_cache_n=0,
            no_paged_attn=True,
            jinja_explicit=str(directory / "messages.jinja"),
        )

    def run(order: Order) -> int:
        n, new_tokens, is_greedy = order["n"], order["new_tokens"], order["temperature"] == 0

        def stream(prompt: list[int]) -> Any:
            request = library.ChatCompletionRequest(
                model=name,
                messages=[{"role": "user", "content": " ".join(map(str, prompt))}],
                n_choices=n,
                max_tokens=new_tokens,
                temperature=None if is_greedy else order["temperature"],
                top_k=1 if is_greedy else None,
                ignore_eos=True,
                logprobs=True,
                stream=True,
                enable_thinking=False,
            )
            return runner.send_chat_completion_request(request)

        for chunks in [stream(prompt) for prompt in order["prompts"]]:
            samples: list[list[float]] = [[] for _ in range(n)]
            for choice in (choice for chunk in chunks for choice in chunk.choices):
                samples[choice.index].append(choice.logprobs.logprob)
            # A stream of several samples ends with the first half of them: for the others the last token is made but
            # not sent.
            if min(map(len, samples)) < new_tokens - (n > 1):
                raise RuntimeError(f"mistral.rs has sent {[len(s) for s in samples]} tokens of {new_tokens}")
        return len(order["prompts"]) * n * new_tokens

    return version("mistralrs"), run, lambda: None


def main() -> None:
    # Moves standard output away, so that nothing that libraries print is taken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    peers: dict[str, Callable[..., tuple[str, Runner, Callable[[], object]]]]
    peers = {"vllm": vllm, "transformers": transformers, "llama.cpp": llama_cpp, "mistral.rs": mistral_rs}
    release, run, clear = peers[sys.argv[1]](*sys.argv[2:])
    print(json.dumps({"version": release}), file=answers, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        clear()
        start = time.perf_counter()
        tokens = run(order)
        seconds = time.perf_counter() - start
        if tokens != len(order["prompts"]) * order["n"] * order["new_tokens"]:
            raise RuntimeError(f"{tokens} tokens are not those of {len(order['prompts'])} prompts x {order['n']}")
        print(json.dumps({"seconds": seconds}), file=answers, flush=True)


if __name__ == "__main__":
    main()
