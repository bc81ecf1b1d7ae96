"""Tenants: who may be one, what each gets, quotas, and their numbers."""

from __future__ import annotations

import http.client
import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from models import random_adapter, read_model, write_adapter
from rollout_client import (
    InvalidArgument,
    PermissionDenied,
    ResourceExhausted,
    RolloutClient,
    SamplingParams,
    ServerProcess,
)
from rollout_client._token import read_token
from serving import FIXTURES, PUSH_MODEL, SMALL_CACHE, assert_idle, wait_for

TRAINER, USER, PLAIN = (f"token-of-{who}-0123456789" for who in ("trainer", "user", "plain"))
SHORT = SamplingParams(max_tokens=8, seed=11, ignore_eos=True)
# Names that are none, and what is said of them.
WRONG = {"two words": "printable ASCII", "\u00e9": "printable ASCII", "x" * 65: "has 65 bytes"}


@pytest.fixture(scope="module")
def guarded(binary, tmp_path_factory):
    tokens = tmp_path_factory.mktemp("tenants") / "tokens"
    tokens.write_text(f"control {TRAINER} trainers\ngenerate {USER} team-a\ngenerate {PLAIN}\n")
    tokens.chmod(0o600)
    flags = [*SMALL_CACHE, "--auth-token-file", str(tokens)]
    with ServerProcess(binary, FIXTURES / "llama-tied", flags, token=TRAINER) as process:
        yield process
        assert_idle(process.client)


def complete(process, token, tenant):
    """Status of a completion over HTTP, and the error's message."""
    connection = http.client.HTTPConnection(process.http_address, timeout=60)
    headers = {"content-type": "application/json", "authorization": f"Bearer {token}"}
    if tenant is not None:
        headers["x-tenant"] = tenant
    body = json.dumps({"model": "x", "prompt": [1, 2, 3], "max_tokens": 4})
    connection.request("POST", "/v1/completions", body.replace('"x"', json.dumps(process.client.info().model)), headers)
    answer = connection.getresponse()
    text = json.loads(answer.read())
    connection.close()
    return answer.status, text.get("error", {}).get("message", "")


def generated(client):
    return {name: tenant.generated_tokens for name, tenant in client.status().tenants.items()}


def test_a_request_is_of_the_tenant_of_its_token_or_of_the_one_that_control_names(guarded):
    before = generated(guarded.client)
    tokens = {"team-a": 0, "trainers": 0, "": 0, "team-b": 0}
    for token, named, tenant in [
        (USER, None, "team-a"),
        (USER, "team-a", "team-a"),
        (PLAIN, None, ""),
        (TRAINER, None, "trainers"),
        (TRAINER, "team-b", "team-b"),
    ]:
        with RolloutClient(guarded.address, token=token, timeout=60) as client:
            client.generate([[1, 2, 3]], sampling=SHORT, return_text=False, tenant=named)
            client.score([[1, 2, 3]], tenant=named)
        assert complete(guarded, token, named)[0] == 200
        tokens[tenant] += 8 + 4
    after = generated(guarded.client)
    assert {name: after[name] - before.get(name, 0) for name in tokens} == tokens
    assert after.keys() == tokens.keys(), "no other tenant was named"


def test_the_role_generate_names_no_other_tenant(guarded):
    for token in (USER, PLAIN):
        with RolloutClient(guarded.address, token=token, timeout=60) as client:
            for call in (
                lambda: client.generate([[1, 2, 3]], return_text=False, tenant="team-b"),
                lambda: client.score([[1, 2, 3]], tenant="team-b"),
            ):
                with pytest.raises(PermissionDenied, match="tenant: is not that of the token"):
                    call()
        status, message = complete(guarded, token, "team-b")
        assert status == 403 and message.startswith("tenant: is not that of the token")


@pytest.mark.parametrize("name", WRONG)
def test_a_name_is_short_and_printable(guarded, name):
    for call in (
        lambda: guarded.client.generate([[1, 2, 3]], return_text=False, tenant=name),
        lambda: guarded.client.score([[1, 2, 3]], tenant=name),
    ):
        with pytest.raises(InvalidArgument, match=f"tenant: .*{WRONG[name]}"):
            call()
    status, message = complete(guarded, TRAINER, name.encode().decode("latin-1"))
    assert status == 400 and "tenant" in message


def test_the_numbers_of_tenants_are_in_the_metrics_and_on_the_page(guarded):
    guarded.client.generate([[7] * 9], sampling=SHORT, return_text=False, tenant="team-b")
    asked = {"authorization": f"Bearer {TRAINER}"}
    url = f"http://{guarded.http_address}"
    with urllib.request.urlopen(urllib.request.Request(f"{url}/metrics", headers=asked), timeout=60) as answer:
        metrics = answer.read().decode()
    status = guarded.client.status().tenants["team-b"]
    numbers = {
        "running_samples": status.running_samples,
        "waiting_samples": status.waiting_samples,
        "kv_blocks": status.kv_blocks,
        "prompt_tokens_total": status.prompt_tokens,
        "generation_tokens_total": status.generated_tokens,
    }
    assert status.prompt_tokens >= 9 and status.generated_tokens >= 8
    for name, value in numbers.items():
        assert f'\nrollout:tenant_{name}{{tenant="team-b"}} {value}\n' in metrics
    with urllib.request.urlopen(urllib.request.Request(f"{url}/events", headers=asked), timeout=60) as answer:
        event = json.loads(answer.readline().removeprefix(b"data: "))
    row = next(row for row in event["tenants"] if row["name"] == "team-b")
    assert (row["running"], row["prompt_tokens"]) == (0, status.prompt_tokens)


def test_a_token_is_read_from_a_line_with_its_tenant(tmp_path):
    path = tmp_path / "tokens"
    path.write_text(f"# role token tenant\ngenerate {USER} team-a\ncontrol {TRAINER} trainers\n")
    assert read_token(path) == TRAINER
    path.write_text(f"generate {USER} team-a\n")
    assert read_token(path) == USER
    path.write_text(f"generate {USER} team-a more\n")
    with pytest.raises(InvalidArgument, match="expected a token"):
        read_token(path)


def test_a_flood_of_one_tenant_does_not_hold_up_the_others(binary):
    """1,000 samples of one tenant take all places. Seven others ask for 8 at a time, three times each."""
    places, rounds = 64, 3
    flags = [*SMALL_CACHE, "--max-num-seqs", str(places)]
    long = SamplingParams(max_tokens=900, seed=3, ignore_eos=True)
    with (
        ServerProcess(binary, FIXTURES / "llama-tied", flags) as process,
        ThreadPoolExecutor(max_workers=8) as pool,
    ):
        client = process.client
        prompts = [[index % 200, 5, 6] for index in range(125)]
        flood = pool.submit(
            client.generate, prompts, n=8, sampling=long, return_text=False, request_id="flood", tenant="flood"
        )
        wait_for(client, lambda status: status.running_samples == places, "flooded")

        def modest(number):
            for index in range(rounds):
                tenant = f"tenant-{number}"
                outputs = client.generate(
                    [[number, index, 7]], n=8, sampling=SHORT, return_text=False, tenant=tenant, timeout=300
                )
                assert [len(sample.token_ids) for sample in outputs[0].samples] == [8] * 8

        list(pool.map(modest, range(7)))
        client.abort("flood")
        tokens = sum(len(sample.token_ids) for output in flood.result(60) for sample in output.samples)
        status = client.status()
        assert_idle(client)
    assert 0 < tokens < 1000 * 900 / 2, "the others ended long before the flood"
    assert status.preemptions == 0, "nothing was computed twice"
    assert {name: tenant.generated_tokens for name, tenant in status.tenants.items() if name != "flood"} == {
        f"tenant-{number}": rounds * 8 * 8 for number in range(7)
    }


def test_quotas_of_running_samples_and_blocks_delay(binary):
    flags = [*SMALL_CACHE, "--tenant-max-running", "2", "--tenant-kv-share", "0.5"]
    with (
        ServerProcess(binary, FIXTURES / "llama-tied", flags) as process,
        ThreadPoolExecutor(max_workers=2) as pool,
    ):
        client = process.client
        sampling = SamplingParams(max_tokens=100, seed=3, ignore_eos=True)
        asked = [
            pool.submit(client.generate, [[number, 5]], n=6, sampling=sampling, return_text=False, tenant=f"t{number}")
            for number in range(2)
        ]
        most = 0
        while not all(request.done() for request in asked):
            tenants = client.status().tenants
            most = max([most, *(tenant.running_samples for tenant in tenants.values())])
        assert all(len(request.result()[0].samples) == 6 for request in asked)
        assert_idle(client)
    assert most <= 2


def test_a_quota_of_adapters_rejects(binary, tmp_path):
    rng, base = np.random.default_rng(7), read_model(PUSH_MODEL)
    adapter = random_adapter(rng, base)
    tokens = tmp_path / "tokens"
    tokens.write_text(f"control {TRAINER} a\ncontrol {USER} b\n")
    tokens.chmod(0o600)
    flags = [*SMALL_CACHE, "--auth-token-file", str(tokens), "--max-adapters", "3", "--tenant-max-adapters", "1"]
    with (
        ServerProcess(binary, PUSH_MODEL, flags, token=TRAINER) as process,
        RolloutClient(process.address, token=USER, timeout=60) as other,
    ):
        process.client.push_lora(*adapter, name="first")
        with pytest.raises(ResourceExhausted, match=r'"second" would be more than --tenant-max-adapters 1 .*"a"'):
            process.client.push_lora(*adapter, name="second")
        process.client.push_lora(*adapter, name="first")
        other.push_lora(*adapter, name="second")
        process.client.remove_adapter("first")
        process.client.push_lora(*adapter, name="third")
        assert {adapter.name for adapter in other.adapters()} == {"second", "third"}


def test_adapters_on_demand_leave_for_others_of_their_tenant(binary, tmp_path):
    rng, base = np.random.default_rng(7), read_model(PUSH_MODEL)
    for name in ("x", "y", "z"):
        write_adapter(tmp_path / "served" / name, *random_adapter(rng, base))
    flags = [*SMALL_CACHE, "--adapters-dir", str(tmp_path / "served"), "--max-adapters", "3"]
    with ServerProcess(binary, PUSH_MODEL, [*flags, "--tenant-max-adapters", "1"]) as process:
        client = process.client
        for tenant, name in [("a", "x"), ("b", "z"), ("a", "y")]:
            client.generate([[1, 2]], sampling=SHORT, return_text=False, adapter=name, tenant=tenant)
        assert {adapter.name for adapter in client.adapters()} == {"y", "z"}, "x has left its slot, and one is free"
