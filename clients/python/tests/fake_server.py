"""A server of `rollout.v1` in this process whose answers a test sets."""

from __future__ import annotations

import math
import threading
from concurrent import futures
from itertools import chain

import grpc

from fake_weights import FakeWeights
from rollout_client import _proto

GenerateResponse = _proto.GENERATE.response


class FakeServer:
    """Answers each method with `answers[name](request, context)`; remembers requests and metadata.

    Before its answers, Generate sends each prompt back, as `prompts` says. `cancelled` is set once a client has left a
    call that was still running.
    """

    def __init__(self):
        self.answers = {}
        self.requests = []
        self.metadata = []
        self.prompts = prompts
        self.cancelled = threading.Event()
        self._server = grpc.server(
            futures.ThreadPoolExecutor(max_workers=8),
            options=[("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)],
        )
        self.weights = FakeWeights()
        self.answers.update(self.weights.answers())
        for service in ("Rollout", "Control", "Weights"):
            methods = [m for m in vars(_proto).values() if isinstance(m, _proto.Method) and f".{service}/" in m.path]
            handlers = {m.path.rpartition("/")[2]: self._handler(m) for m in methods}
            self._server.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler(f"rollout.v1.{service}", handlers),)
            )
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def _handler(self, method):
        name = method.path.rpartition("/")[2]
        make = {
            "Generate": grpc.unary_stream_rpc_method_handler,
            "Score": grpc.unary_stream_rpc_method_handler,
            "Update": grpc.stream_unary_rpc_method_handler,
        }.get(name, grpc.unary_unary_rpc_method_handler)

        def behaviour(request, context):
            self.requests.append(request)
            self.metadata.append(dict(context.invocation_metadata()))
            answer = self.answers[name](request, context)
            return chain(self.prompts(request), answer) if name == "Generate" else answer

        return make(behaviour, method.request.FromString, method.response.SerializeToString)

    def stall(self, *first):
        """A Generate that sends `first`, then nothing until the client leaves."""

        def messages():
            yield from first
            self.cancelled.wait(20)

        def answer(request, context):
            # Before the first answer: the client may be gone as soon as it has it.
            context.add_callback(self.cancelled.set)
            return messages()

        self.answers["Generate"] = answer

    def __enter__(self):
        self._server.start()
        return self

    def __exit__(self, *error):
        self._server.stop(grace=None).wait()


def prompts(request):
    """A `GenerateResponse` with the token ids of every prompt; a text or a chat has token 1."""
    for index, prompt in enumerate(request.prompts):
        yield GenerateResponse(prompt={"prompt_index": index, "token_ids": prompt.tokens.ids or [1]})


def scores(request):
    """A `ScoreResponse` for every sequence."""
    for index in range(len(request.sequences)):
        yield _proto.SCORE.response(score={"raw_logprobs": [math.nan], "logprobs": [math.nan]}, sequence_index=index)


def completion(prompt_index=0, sample_index=0, token_ids=(5,), **fields):
    """A `GenerateResponse` with a completion; log-probabilities are made up unless given."""
    fields = {
        "logprobs": [-0.5] * len(token_ids),
        "raw_logprobs": [-0.25] * len(token_ids),
        "finish_reason": 4,
        "seed": 1,
        **fields,
    }
    return GenerateResponse(
        completion={"prompt_index": prompt_index, "sample_index": sample_index, "token_ids": token_ids, **fields}
    )


def summary(**fields):
    return GenerateResponse(summary=fields)
