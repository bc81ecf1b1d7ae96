"""Tokens: every method and every route with no token, a wrong one and one of each role; owners; a file that changes."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import re
import signal
import subprocess
import time
from contextlib import suppress

import grpc
import pytest

from certificates import replace
from rollout_client import (
    AsyncRolloutClient,
    FinishReason,
    InvalidArgument,
    PermissionDenied,
    RolloutClient,
    RolloutError,
    ServerProcess,
    Unauthenticated,
    _proto,
)
from rollout_client._convert_weights import update_header
from serving import FIXTURES, LONG, SMALL_CACHE, assert_idle, wait_for

MODEL = FIXTURES / "llama-tied"
TRAINER, USER, OTHER, NOBODY = (f"token-of-{who}-0123456789" for who in ("trainer", "user", "other", "nobody"))
TOKENS = {"none": None, "unknown": NOBODY, "generate": USER, "control": TRAINER}
MALFORMED = b"\xff"

# What each method needs. A method that is not here fails a test.
METHODS = {
    "/rollout.v1.Rollout/Generate": "generate",
    "/rollout.v1.Rollout/Score": "generate",
    "/rollout.v1.Rollout/Abort": "generate",
    "/rollout.v1.Weights/Update": "control",
    "/rollout.v1.Weights/CancelUpdate": "control",
    "/rollout.v1.Weights/ListParameters": "control",
    "/rollout.v1.Weights/Checksum": "control",
    "/rollout.v1.Weights/ListAdapters": "generate",
    "/rollout.v1.Weights/RemoveAdapter": "control",
    "/rollout.v1.Control/GetInfo": "generate",
    "/rollout.v1.Control/GetStatus": "generate",
    "/rollout.v1.Control/GetTimeline": "generate",
    "/rollout.v1.Control/ResetPrefixCache": "control",
    "/rollout.v1.Control/Sleep": "control",
    "/rollout.v1.Control/Wake": "control",
    "/rollout.v1.Control/Pause": "control",
    "/rollout.v1.Control/Resume": "control",
    "/grpc.health.v1.Health/Check": "anyone",
    "/grpc.health.v1.Health/Watch": "anyone",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": "generate",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": "generate",
}
# Routes that /openapi.json leaves out: itself, and a stream without an end, which is the page's own.
NOT_DESCRIBED = {"GET /openapi.json": "generate", "GET /events": "generate"}
# What each route needs, as /openapi.json says it too.
ROUTES = {
    "GET /": "anyone",
    "GET /page/{file}": "anyone",
    "GET /health": "anyone",
    "GET /liveness": "anyone",
    "GET /ping": "anyone",
    "GET /version": "generate",
    "GET /metrics": "generate",
    "GET /timeline.json": "generate",
    "GET /v1/models": "generate",
    "GET /v1/models/{id}": "generate",
    "POST /v1/completions": "generate",
    "POST /v1/chat/completions": "generate",
    "POST /v1/chat/completions/render": "generate",
    "POST /v1/responses": "generate",
    "POST /invocations": "generate",
    "POST /v1/messages": "generate",
    "POST /v1/messages/count_tokens": "generate",
    "POST /tokenize": "generate",
    "POST /detokenize": "generate",
    "GET /tokenizer_info": "generate",
    "GET /server_info": "generate",
    "GET /get_world_size": "generate",
    "GET /load": "generate",
    "GET /is_paused": "generate",
    "GET /is_sleeping": "generate",
    "GET /weight_info": "generate",
    "POST /abort_requests": "generate",
    "POST /inference/v1/abort_requests": "generate",
    "POST /inference/v1/generate": "generate",
    "POST /pause": "control",
    "POST /resume": "control",
    "POST /sleep": "control",
    "POST /wake_up": "control",
    "POST /reset_prefix_cache": "control",
    "POST /reset_mm_cache": "control",
    "POST /reset_encoder_cache": "control",
    "POST /v1/load_lora_adapter": "control",
    "POST /load_lora_adapter": "control",
    "POST /init_broadcaster": "control",
    "POST /v1/unload_lora_adapter": "control",
    "POST /update_weight_version": "control",
    "POST /weight_checker": "control",
    "POST /init_weight_transfer_engine": "control",
    "POST /start_weight_update": "control",
    "POST /start_draft_weight_update": "control",
    "POST /update_weights": "control",
    "POST /finish_weight_update": "control",
    "POST /shutdown_weight_transfer_engine": "control",
    "POST /collective_rpc": "control",
    "POST /release_kv_cache_memory": "control",
}
MAY = {"anyone": set(TOKENS), "generate": {"generate", "control"}, "control": {"control"}}


def token_file(path, *lines):
    replace(path, "".join(f"{line}\n" for line in lines).encode())
    return path


@pytest.fixture(scope="module")
def guarded(binary, tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokens")
    lines = ["# who may", f"control {TRAINER}", "", f"generate {USER}", f"generate {OTHER}"]
    flags = [*SMALL_CACHE, "--auth-token-file", token_file(directory / "tokens", *lines)]
    with (directory / "log").open("w") as log:
        flags = list(map(str, flags))
        with ServerProcess(binary, MODEL, flags, output=log, token=TRAINER) as process:
            yield process
            assert_idle(process.client)
    said = (directory / "log").read_text()
    assert not re.search("token-of", said), "a token is in the log"


def services(address, version):
    """What reflection lists."""
    with grpc.insecure_channel(address) as channel:
        call = channel.stream_stream(f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo")
        asked = iter([b"\x3a\x01*"])
        answer = next(call(asked, metadata=[("authorization", f"Bearer {USER}")], timeout=60))
    return {name.decode() for name in re.findall(rb"[a-z]+\.[\w.]+", answer)}


def grpc_code(address, path, token, message=MALFORMED):
    """The status of a call with this message; OK for one that goes on."""
    metadata = [] if token is None else [("authorization", f"Bearer {token}")]
    with grpc.insecure_channel(address) as channel:
        call = channel.stream_stream(path)(iter([message]), metadata=metadata, timeout=60)
        try:
            next(call, None)
        except grpc.RpcError as error:
            return error.code().name
        finally:
            call.cancel()
    return "OK"


def request(address, route, token, body=None, headers=()):
    """Status, headers and the beginning of the body of an answer."""
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    try:
        connection.putrequest(*route.split())
        for name, value in [("content-length", str(len(body or b""))), *headers]:
            connection.putheader(name, value)
        if token is not None:
            connection.putheader("authorization", f"Bearer {token}")
        connection.endheaders(body)
        answer = connection.getresponse()
        streams = answer.headers.get_content_type() == "text/event-stream"
        return answer.status, answer.headers, b"" if streams else answer.read()
    finally:
        connection.close()


def test_every_method_has_its_role(guarded):
    described = {
        f"/{service.full_name}/{method.name}"
        for name in ("Rollout", "Weights", "Control")
        for service in [_proto._pool.FindServiceByName(f"rollout.v1.{name}")]
        for method in service.methods
    }
    ours = {path for path in METHODS if path.startswith("/rollout.v1.")}
    assert ours == described, "say in METHODS what each method needs"
    listed = services(guarded.address, "v1") | services(guarded.address, "v1alpha")
    assert {path.split("/")[1] for path in METHODS} == listed, "say what each service needs"
    for path, role in METHODS.items():
        for who, token in TOKENS.items():
            code = grpc_code(guarded.address, path, token)
            if who in MAY[role]:
                assert code not in ("UNAUTHENTICATED", "PERMISSION_DENIED"), (path, who, code)
            else:
                expected = "PERMISSION_DENIED" if who == "generate" else "UNAUTHENTICATED"
                assert code == expected, (path, who, code)
    assert grpc_code(guarded.address, "/grpc.health.v1.Health/Check", None, b"") == "OK"
    # What needs no token takes no more than a name.
    assert grpc_code(guarded.address, "/grpc.health.v1.Health/Check", None, bytes(5000)) == "INVALID_ARGUMENT"
    assert grpc_code(guarded.address, "/rollout.v1.Rollout/Nothing", None) == "UNAUTHENTICATED"
    assert grpc_code(guarded.address, "/rollout.v1.Rollout/Nothing", USER) == "UNIMPLEMENTED"


def test_every_route_has_its_role(guarded):
    address = guarded.http_address
    status, _, body = request(address, "GET /openapi.json", USER)
    assert status == 200
    described = {
        f"{method.upper()} {path}": operation.get("x-role")
        for path, operations in json.loads(body)["paths"].items()
        for method, operation in operations.items()
        if method in ("get", "post", "put", "delete", "patch")
    }
    assert described == ROUTES, "say in ROUTES what each route needs"
    for route, role in {**ROUTES, **NOT_DESCRIBED}.items():
        for who, token in TOKENS.items():
            # No route takes this body. Those without one do what they do, and it is undone at the end.
            asked = re.sub(r"{\w+}", "x", route)
            # A server that answers before it has read a body resets the connection, perhaps within its answer.
            sent = b"" if route.startswith("GET ") else b"{"
            status, headers, body = request(address, asked, token, sent, [("content-type", "application/json")])
            if who in MAY[role]:
                assert status not in (401, 403), (route, who, status)
                continue
            assert status == (403 if who == "generate" else 401), (route, who, status)
            assert headers["www-authenticate"] == ("Bearer" if status == 401 else None)
            error = json.loads(body)["error"]
            assert error.keys() >= {"message", "type", "param", "code"} and error["code"] == status
    with suppress(RolloutError):
        guarded.client.wake()
    with suppress(RolloutError):
        guarded.client.resume()


def test_a_header_is_a_bearer_token_or_refused(guarded):
    with grpc.insecure_channel(guarded.address) as channel:
        call = channel.unary_unary(_proto.GET_STATUS.path)
        for value in (f"bearer {USER}", f"BEARER  {USER} "):
            call(b"", metadata=[("authorization", value)])
        for value in ("", "Bearer", "Bearer ", f"Basic {USER}", USER, f"Bearer {USER} x", f"Bearer {USER[:-1]}"):
            with pytest.raises(grpc.RpcError) as refused:
                call(b"", metadata=[("authorization", value)])
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED, value
            assert "token-of" not in refused.value.details()
        twice = [("authorization", f"Bearer {USER}")] * 2
        with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
            call(b"", metadata=twice)


@pytest.mark.parametrize(
    ("token", "error", "said"),
    [
        (None, Unauthenticated, "no token"),
        (NOBODY, Unauthenticated, "invalid bearer token"),
        (USER, PermissionDenied, "role control; this one has the role generate"),
    ],
)
def test_the_client_says_what_is_wrong_with_its_token(guarded, token, error, said):
    with RolloutClient(guarded.address, token=token, timeout=60) as client:
        for call in (client.sleep, lambda: client.push_lora(None), client.parameters):
            with pytest.raises(error, match=said):
                call()
        if token == USER:
            assert client.generate([[1, 2, 3]], return_text=False)


def test_a_token_that_no_header_can_carry_is_refused_without_an_echo():
    for token in ("", "two words", "line\nend", "\u00e9" * 20):
        for make in (RolloutClient, AsyncRolloutClient):
            with pytest.raises(InvalidArgument) as refused:
                make("127.0.0.1:1", token=token)
            assert not token or token not in str(refused.value)


def test_a_request_belongs_to_the_token_that_started_it(guarded):
    def client(token):
        return RolloutClient(guarded.address, token=token, timeout=120)

    with (
        client(USER) as user,
        client(OTHER) as other,
        client(TRAINER) as trainer,
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):

        def start(client, name):
            return pool.submit(client.generate, [[5, 6, 7]], n=4, sampling=LONG, request_id=name, return_text=False)

        def ended(request):
            return {sample.finish_reason for sample in request.result(60)[0].samples}

        running = {
            name: start(client, name) for name, client in [("a", user), ("b", user), ("c", other), ("d", trainer)]
        }
        wait_for(trainer, lambda status: status.running_requests == 4, "running")
        mine = other.abort(["a", "d", "ghost"])
        assert (mine.aborted, mine.unknown) == ([], ["a", "d", "ghost"])
        assert other.abort(all=True).aborted == ["c"]
        assert ended(running["c"]) == {FinishReason.ABORTED}
        assert user.abort("a").aborted == ["a"]
        assert sorted(trainer.abort(["b", "d"]).aborted) == ["b", "d"]
        assert ended(running["a"]) == ended(running["b"]) == ended(running["d"]) == {FinishReason.ABORTED}


def test_the_adapter_of_a_push_that_may_fail_shows_to_the_role_control_alone(binary, tmp_path):
    tokens = token_file(tmp_path / "tokens", f"control {TRAINER}", f"generate {USER}")
    flags = [*SMALL_CACHE, "--auth-token-file", str(tokens), "--max-adapters", "1"]
    message = _proto.UPDATE.request(header=update_header("lora", {"name": "secret-plan"}))
    message.header.total_bytes = 1000

    def page(address, token):
        """The first event of the page."""
        host, _, port = address.rpartition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=60)
        connection.request("GET", "/events", headers={"authorization": f"Bearer {token}"})
        event = json.loads(connection.getresponse().readline().removeprefix(b"data: "))
        connection.close()
        return event

    with (
        ServerProcess(binary, MODEL, flags, token=TRAINER) as process,
        RolloutClient(process.address, token=USER) as user,
    ):
        with process.client._pusher.start(60) as stream:
            stream.send(message.SerializeToString())
            wait_for(process.client, lambda status: status.update and status.update.adapter == "secret-plan", "open")
            update = user.status().update
            assert (update.kind, update.adapter) == ("lora", None)
        wait_for(process.client, lambda status: status.update is None, "ended")
        for token, adapter in [(USER, None), (TRAINER, "secret-plan")]:
            event = page(process.http_address, token)
            assert [push["adapter"] for push in event["pushes"]] == [adapter]
            assert ("secret-plan" in json.dumps(event)) == (token == TRAINER)


def test_messages_without_a_token_are_not_received(guarded):
    status = f"/proc/{guarded.process.pid}/status"

    def resident(name):
        with open(status) as file:
            return int(re.search(rf"{name}:\s+(\d+) kB", file.read()).group(1)) << 10

    with open(f"/proc/{guarded.process.pid}/clear_refs", "w") as file:
        file.write("5")
    before = resident("VmRSS")
    message = bytes(60 << 20)

    def call(_):
        return grpc_code(guarded.address, _proto.GENERATE.path, NOBODY, message)

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        assert set(pool.map(call, range(12))) == {"UNAUTHENTICATED"}
    headers = [("content-type", "application/json")]
    for _ in range(5):
        # The body is announced and never sent.
        host, _, port = guarded.http_address.rpartition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=60)
        connection.putrequest("POST", "/v1/completions")
        for name, value in [*headers, ("content-length", str(100 << 20))]:
            connection.putheader(name, value)
        connection.endheaders()
        assert connection.getresponse().status == 401
        connection.close()
    # The transport's own window of 16 MiB for a connection may have filled before the refusal was sent.
    assert resident("VmHWM") < before + 6 * (16 << 20) + (32 << 20)
    assert guarded.client.status().memory.traffic_bytes < 1 << 20


def test_the_file_is_read_again_and_a_broken_one_is_not(binary, tmp_path):
    path, log = token_file(tmp_path / "tokens", f"control {TRAINER}", f"generate {USER}"), tmp_path / "log"

    def until(condition, what):
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline, what
            time.sleep(0.05)

    def may(token):
        return grpc_code(server.address, _proto.GET_STATUS.path, token, b"") == "OK"

    flags = [*SMALL_CACHE, "--auth-token-file", str(path)]
    with log.open("w") as output, ServerProcess(binary, MODEL, flags, output=output, token=TRAINER) as server:
        stream = RolloutClient(server.address, token=USER, timeout=120)
        with (
            stream,
            stream.generate_stream([[1, 2, 3]], sampling=LONG, stream_tokens=True, return_text=False) as events,
        ):
            next(events)
            token_file(path, f"control {TRAINER}", f"generate {OTHER}")
            until(lambda: not may(USER) and may(OTHER), "the file is read again")
            with pytest.raises(Unauthenticated):
                stream.status()
            assert len(list(events)) > 1, "a call that runs goes on"
        # A file that is written in place, and wrong.
        path.write_text(f"control {TRAINER}\nall {NOBODY}\n")
        until(lambda: "line 2: does not begin with" in log.read_text(), "the mistake is logged")
        time.sleep(1.5)
        assert may(OTHER) and not may(NOBODY)
        assert log.read_text().count("line 2: does not begin with") == 1
        path.write_text(f"control {TRAINER}\n")
        server.process.send_signal(signal.SIGHUP)
        until(lambda: not may(OTHER), "SIGHUP reads it at once")
        path.unlink()
        until(lambda: "tokens: cannot be read" in log.read_text(), "a missing file is logged")
        assert may(TRAINER)
    assert "token-of" not in log.read_text()


def start_and_end(binary, *flags):
    """What a server says that ends at its start."""
    command = [str(binary), "--model", str(MODEL), "--port", "0", "--http-port", "0", *map(str, flags)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert ended.returncode != 0, ended.stderr
    return ended.stderr


def test_what_ends_the_start_is_one_message(binary, tmp_path):
    good = token_file(tmp_path / "good", f"control {TRAINER}")
    for flags, said in [
        (["--host", "0.0.0.0"], "--host 0.0.0.0 can be reached from other machines"),
        (["--host", "::"], "--host :: can be reached from other machines"),
        (["--auth-token-file", tmp_path / "missing"], "missing: cannot be read: No such file"),
        (["--auth-token-file", tmp_path], "is not a file"),
        (["--auth-token-file", token_file(tmp_path / "empty", "# nobody")], "empty: has no token"),
        (["--auth-token-file", token_file(tmp_path / "short", "control secret")], "short: line 1: the token has 6"),
        (["--auth-token-file", good, "--tls-cert", "a.pem"], "--tls-cert a.pem: must be given together with --tls-key"),
    ]:
        lines = start_and_end(binary, *flags).strip().splitlines()
        assert len(lines) == 1 and said in lines[0] and "secret" not in lines[0], lines


def test_with_tokens_an_open_port_is_warned_of_for_want_of_tls(binary, tmp_path):
    path, log = token_file(tmp_path / "tokens", f"control {TRAINER}"), tmp_path / "log"
    path.chmod(0o644)
    flags = [*SMALL_CACHE, "--auth-token-file", str(path)]
    with log.open("w") as output:
        server = ServerProcess(binary, MODEL, flags, host="0.0.0.0", output=output, token=TRAINER)
        with server:
            server.client.status()
    said = log.read_text()
    assert said.count("travel unencrypted; give --tls-cert and --tls-key") == 1
    assert said.count("others may open it (mode 644)") == 1
