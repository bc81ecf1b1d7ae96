"""The routes of vLLM 0.33, each with a request that changes nothing that lasts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm_answers import Answer, ask

CHAT = [{"role": "user", "content": "Hi"}]
ONE = {"max_tokens": 1}
ADAPTER = {"lora_name": "a", "lora_path": "peft/plain"}


@dataclass(frozen=True)
class Request:
    """A request to a route: its body, and its query."""

    body: Any = None
    query: str = ""
    statuses: tuple[int, ...] = (200,)
    """Those of a route that works."""
    path: str = ""
    """The path, if it has parameters."""


NONE = Request()
BODY = Request({})
ROUTES = {
    "POST /v1/completions": Request({"prompt": "a", **ONE}),
    "POST /v1/completions/render": Request({"prompt": "a"}),
    "POST /v1/completions/derender": BODY,
    "POST /v1/chat/completions": Request({"messages": CHAT, **ONE}),
    "POST /v1/chat/completions/batch": Request({"messages": [CHAT], **ONE}),
    "POST /v1/chat/completions/render": Request({"messages": CHAT}),
    "POST /v1/chat/completions/derender": BODY,
    "POST /v1/responses": Request({"input": "a", "max_output_tokens": 1}),
    "GET /v1/responses/{response_id}": Request(path="/v1/responses/resp_1", statuses=(404,)),
    "POST /v1/responses/{response_id}/cancel": Request({}, path="/v1/responses/resp_1/cancel", statuses=(404,)),
    "POST /v1/responses/render": Request({"input": "a"}),
    "POST /v1/messages": Request({"messages": CHAT, "model": "probe", **ONE}),
    "POST /v1/messages/count_tokens": Request({"messages": CHAT, "model": "probe"}),
    "POST /v1/messages/render": Request({"messages": CHAT, "model": "probe", **ONE}),
    "POST /cohere/v2/chat": BODY,
    "POST /cohere/v2/chat/render": BODY,
    "POST /v1/decisions": BODY,
    "POST /v1/systemone": BODY,
    "POST /generative_scoring": BODY,
    "GET /v1/models": NONE,
    "POST /tokenize": Request({"prompt": "a"}),
    "POST /detokenize": Request({"tokens": [5]}),
    "GET /tokenizer_info": NONE,
    "POST /inference/v1/generate": Request({"token_ids": [5], "sampling_params": ONE}),
    "POST /inference/v1/abort_requests": Request({"request_ids": ["none"]}),
    "POST /abort_requests": Request({"request_ids": ["none"]}),
    "POST /v1/load_lora_adapter": Request(ADAPTER),
    "POST /v1/unload_lora_adapter": Request({"lora_name": "a"}),
    "GET /health": NONE,
    "GET /ping": NONE,
    "POST /ping": BODY,
    "POST /invocations": Request({"prompt": "a", **ONE}),
    "POST /adapters": BODY,
    "DELETE /adapters/{adapter_name}": Request(path="/adapters/a", statuses=(404,)),
    "GET /load": NONE,
    "GET /version": NONE,
    "GET /metrics": NONE,
    "GET /openapi.json": NONE,
    "GET /docs": NONE,
    "GET /kv_event_sources": NONE,
    "POST /start_profile": BODY,
    "POST /stop_profile": BODY,
    "POST /pause": Request(query="?mode=keep"),
    "GET /is_paused": NONE,
    "POST /resume": NONE,
    "POST /sleep": Request(query="?level=1"),
    "GET /is_sleeping": NONE,
    "POST /wake_up": NONE,
    "POST /release_kv_cache_memory": NONE,
    "POST /reset_prefix_cache": NONE,
    "POST /reset_mm_cache": NONE,
    "POST /reset_encoder_cache": NONE,
    "POST /collective_rpc": Request({"method": "f"}),
    "GET /server_info": NONE,
    "GET /get_world_size": NONE,
    "GET /weight_info": NONE,
    "POST /weight_checker": Request({"action": "checksum"}),
    "POST /update_weight_version": Request({"new_version": "7"}),
    "POST /init_weight_transfer_engine": Request({"init_info": {}}),
    "POST /start_weight_update": BODY,
    "POST /start_draft_weight_update": BODY,
    "POST /update_weights": Request({"update_info": {}}),
    "POST /finish_weight_update": BODY,
    "POST /shutdown_weight_transfer_engine": BODY,
    "POST /fault_tolerance/apply": BODY,
    "GET /fault_tolerance/status": NONE,
    "POST /scale_elastic_ep": BODY,
    "POST /is_scaling_elastic_ep": BODY,
    "POST /v1/embeddings": BODY,
    "POST /v2/embed": BODY,
    "POST /pooling": BODY,
    "POST /classify": BODY,
    "POST /score": BODY,
    "POST /v1/score": BODY,
    "POST /rerank": BODY,
    "POST /v1/rerank": BODY,
    "POST /v2/rerank": BODY,
    "POST /v1/audio/transcriptions": BODY,
    "POST /v1/audio/translations": BODY,
    "GET /v1/realtime": NONE,
}
"""In an order in which each finds what it needs: a resume after a pause, for example."""


def send(server, route: str) -> Answer:
    """The answer of a route to its request."""
    method, path = route.split()
    request = ROUTES[route]
    return ask(server.http_address, method, (request.path or path) + request.query, request.body)
