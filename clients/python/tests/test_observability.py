"""Metrics, the timeline and the trace file of a real server."""

from __future__ import annotations

import itertools
import json
import signal
import threading
import time
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from models import read_model
from rollout_client import SamplingParams, ServerProcess
from serving import PUSH_MODEL, SMALL_CACHE

WAITING = {"idle", "wait_version", "wait_adapter", "wait_readers", "paused", "asleep", "weights_missing"}


def http(process, path):
    """Status, content type and text of a GET."""
    try:
        with urllib.request.urlopen(f"http://{process.http_address}{path}", timeout=30) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["Content-Type"], error.read().decode()


def scrape(process):
    """Every sample by its name and labels."""
    status, content_type, text = http(process, "/metrics")
    assert (status, content_type) == (200, "text/plain; version=0.0.4; charset=utf-8")
    samples = {}
    for family in text_string_to_metric_families(text):
        assert family.type != "untyped" and family.documentation, family
        for sample in family.samples:
            key = (sample.name, *sorted(sample.labels.items()))
            assert key not in samples, f"{key} comes twice"
            samples[key] = sample.value
    return samples


def value(samples, name, **labels):
    return samples[(name, *sorted(labels.items()))]


def soon(process, condition, what):
    """The first scrape for which `condition` holds: numbers are published between steps, so just after an answer."""
    deadline = time.monotonic() + 30
    while True:
        samples = scrape(process)
        if condition(samples):
            return samples
        assert time.monotonic() < deadline, f"not {what}: {samples}"
        time.sleep(0.01)


@pytest.fixture
def started(binary):
    """A server of its own, so that counts begin at zero."""
    with ServerProcess(binary, PUSH_MODEL, [*SMALL_CACHE, "--mem-util", "0.2"]) as process:
        yield process


def engine_spans(timeline):
    return [span for span in timeline.spans if span.track == "engine"]


def assert_seamless(timeline):
    """Every moment of the engine's track belongs to one span, from the start of the process to now."""
    spans = engine_spans(timeline)
    for before, after in itertools.pairwise(spans):
        assert before.end == after.start and before.id + 1 == after.id, (before, after)
    assert spans[0].start == timeline.started and spans[-1].end is None
    total = sum(phase.seconds for phase in timeline.phases)
    assert total == pytest.approx((timeline.now - timeline.start) / 1e9, abs=1e-6)
    assert sum(phase.share for phase in timeline.phases) == pytest.approx(1.0, abs=1e-6)


def test_metrics_are_exactly_what_was_done(started):
    client = started.client
    before = scrape(started)
    assert value(before, "rollout:generation_tokens_total") == 0
    prompts = [[1, 2, 3, 4, 5], [6, 7, 8]]
    sampling = SamplingParams(max_tokens=9, ignore_eos=True)
    client.generate(prompts, n=3, sampling=sampling, return_text=False)
    client.score([[1, 2, 3, 4]])
    with pytest.raises(Exception, match="temperature"):
        client.generate(prompts, sampling=SamplingParams(temperature=-1))
    status = client.status()
    samples = soon(started, lambda s: value(s, "rollout:generation_tokens_total") == 54, "all tokens")
    assert status.generated_tokens == 54
    for name, number in [
        ("rollout:prompt_tokens_total", status.prompt_tokens),
        ("rollout:prompt_tokens_cached_total", status.cached_tokens),
        ("rollout:num_preemptions_total", status.preemptions),
        ("rollout:spec_decode_num_draft_tokens_total", status.drafted_tokens),
        ("rollout:spec_decode_num_accepted_tokens_total", status.accepted_tokens),
        ("rollout:num_requests_running", 0),
        ("rollout:num_requests_waiting", 0),
        ("rollout:kv_cache_usage_perc", 0),
        ("rollout:weight_version", 0),
        ("rollout:memory_ceiling_bytes", status.memory.ceiling_bytes),
        ("rollout:time_to_first_token_seconds_count", 6),
        ("rollout:inter_token_latency_seconds_count", 48),
        ("rollout:request_time_per_output_token_seconds_count", 6),
        ("rollout:request_generation_tokens_sum", 54),
        ("rollout:request_prompt_tokens_sum", 12),
        ("rollout:e2e_request_latency_seconds_count", 2),
        ("rollout:request_queue_time_seconds_count", 2),
        ("rollout:panics_total", 0),
        ("rollout:log_lines_dropped_total", 0),
    ]:
        assert value(samples, name) == number, name
    steps = sum(value(samples, "rollout:step_time_seconds_count", kind=k) for k in ("prefill", "decode", "mixed"))
    assert steps == status.steps == value(samples, "rollout:step_samples_count")
    assert value(samples, "rollout:request_success_total", finished_reason="length") == 6
    assert value(samples, "rollout:requests_total", outcome="finished") == status.finished_requests == 2
    assert value(samples, "rollout:requests_total", outcome="invalid_argument") == 1
    blocks = {state: value(samples, "rollout:kv_cache_blocks", state=state) for state in ("used", "cached", "free")}
    assert blocks == {
        "used": 0,
        "cached": status.cached_blocks,
        "free": status.free_blocks - status.cached_blocks,
    }
    for use, size in status.memory.entries.items():
        assert value(samples, "rollout:memory_bytes", use=use) == size
    states = {key[1][1]: number for key, number in samples.items() if key[0] == "rollout:lifecycle"}
    assert [state for state, number in states.items() if number] == ["running"] and len(states) == 6
    called = {"grpc_service": "rollout.v1.Rollout", "grpc_method": "Generate"}
    assert value(samples, "grpc_server_handled_total", **called, grpc_code="OK") == 1
    assert value(samples, "grpc_server_handled_total", **called, grpc_code="InvalidArgument") == 1
    assert value(samples, "http_requests_total", handler="/metrics", method="GET", status="2xx") >= 1
    assert value(samples, "rollout:connections") >= 1
    assert abs(value(samples, "process_start_time_seconds") - time.time()) < 300
    assert value(samples, "process_resident_memory_bytes") > 1 << 20


LATENCY = [
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
]  # fmt: skip
NEXT_TOKEN = [
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
]  # fmt: skip
LENGTHS = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0, 20000.0, 50000.0]
VLLM_BUCKETS = {
    "time_to_first_token_seconds": [
        0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
        160.0, 640.0, 2560.0,
    ],
    "inter_token_latency_seconds": NEXT_TOKEN,
    "request_time_per_output_token_seconds": NEXT_TOKEN,
    "e2e_request_latency_seconds": LATENCY,
    "request_queue_time_seconds": LATENCY,
    "request_inference_time_seconds": LATENCY,
    "request_prefill_time_seconds": LATENCY,
    "request_decode_time_seconds": LATENCY,
    "request_prompt_tokens": LENGTHS,
    "request_generation_tokens": LENGTHS,
    "iteration_tokens_total": [2.0**i for i in (0, *range(3, 15))],
}  # fmt: skip
"""Bounds of vLLM 0.33's histograms; those of lengths end at the longest context."""


def test_vllms_dashboards_find_their_names_labels_and_buckets(binary):
    flags = [*SMALL_CACHE, "--mem-util", "0.2", "--served-model-name", 'the "policy"', "alias"]
    with ServerProcess(binary, PUSH_MODEL, flags) as process:
        client = process.client
        sampling = SamplingParams(max_tokens=9, ignore_eos=True)
        client.generate([[1, 2, 3, 4, 5], [6, 7, 8]], n=3, sampling=sampling, return_text=False)
        labels = {"model_name": 'the "policy"', "engine": "0"}
        # Samples are counted as they end, and the engine's own numbers between two steps.
        ends = {"generation_tokens_total": 54, "num_requests_running": 0, "e2e_request_latency_seconds_count": 6}
        samples = soon(
            process, lambda s: all(value(s, f"vllm:{name}", **labels) == n for name, n in ends.items()), "the end"
        )
        for name, number in [
            ("num_requests_running", 0),
            ("num_requests_waiting", 0),
            ("kv_cache_usage_perc", 0),
            ("prompt_tokens_total", 8),
            ("prefix_cache_queries_total", 8),
            ("num_preemptions_total", 0),
            ("time_to_first_token_seconds_count", 6),
            ("inter_token_latency_seconds_count", 48),
            ("request_time_per_output_token_seconds_count", 6),
            ("e2e_request_latency_seconds_count", 6),
            ("request_queue_time_seconds_count", 6),
            ("request_inference_time_seconds_count", 6),
            ("request_prefill_time_seconds_count", 6),
            ("request_decode_time_seconds_count", 6),
            ("request_generation_tokens_sum", 54),
            ("request_prompt_tokens_sum", 3 * (5 + 3)),
        ]:
            assert value(samples, f"vllm:{name}", **labels) == number, name
        assert value(samples, "vllm:request_success_total", finished_reason="length", **labels) == 6
        assert value(samples, "vllm:engine_sleep_state", sleep_state="awake", **labels) == 1
        for name in ("drafts", "draft_tokens", "accepted_tokens"):
            same = value(samples, f"rollout:spec_decode_num_{name}_total")
            assert value(samples, f"vllm:spec_decode_num_{name}_total", **labels) == same
        parts = [value(samples, f"vllm:request_{part}_time_seconds_sum", **labels) for part in ("prefill", "decode")]
        inference = value(samples, "vllm:request_inference_time_seconds_sum", **labels)
        assert inference == pytest.approx(sum(parts))
        # In whole nanoseconds, as the server sums them: the sum of two floats may be above the float of the sum.
        total, inner, queued = (
            round(value(samples, f"vllm:{name}_seconds_sum", **labels) * 1e9)
            for name in ("e2e_request_latency", "request_inference_time", "request_queue_time")
        )
        assert total >= inner + queued

        (config,) = (dict(key[1:]) for key in samples if key[0] == "vllm:cache_config_info")
        blocks = client.status().total_blocks
        assert (config["num_gpu_blocks"], config["engine"]) == (str(blocks), "0")
        assert config["kv_cache_size_tokens"] == str(blocks * int(config["block_size"]))
        longest = client.info().max_model_len
        for name, bounds in VLLM_BUCKETS.items():
            wanted = [bound for bound in bounds if bounds is not LENGTHS or bound <= longest]
            found = [dict(key[1:])["le"] for key in samples if key[0] == f"vllm:{name}_bucket"]
            assert found == [*map(str, wanted), "+Inf"], name
        theirs = [key for key in samples if key[0].startswith("vllm:") and key[0] != "vllm:cache_config_info"]
        assert all(labels.items() <= dict(key[1:]).items() for key in theirs)


@pytest.mark.parametrize("names", ["vllm", "rollout"])
def test_one_set_of_names_is_enough(binary, names):
    with ServerProcess(binary, PUSH_MODEL, [*SMALL_CACHE, "--mem-util", "0.2", "--metrics-names", names]) as process:
        prefixes = {name.partition(":")[0] for name, *_ in scrape(process) if ":" in name}
        assert prefixes == {names}
        assert value(scrape(process), "process_start_time_seconds") > 0


def test_labels_are_bounded_however_clients_call(started):
    before = len(scrape(started))
    for path in ["/nothing", "/metrics/x", "/%7f", "/v1/completions?x=y", "/timeline.json?since=x"]:
        assert http(started, path)[0] >= 400
    for method in ["PUT", "BREW"]:
        request = urllib.request.Request(f"http://{started.http_address}/metrics", method=method)
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(request, timeout=30)
    samples = scrape(started)
    new = {key for key in samples if key[0] == "http_requests_total"}
    assert len(samples) - before <= len(new) <= 6, new
    assert value(samples, "http_requests_total", handler="none", method="GET", status="4xx") == 3


def test_phases_follow_each_other_and_add_up(started):
    client = started.client
    client.generate([[1, 2, 3]], sampling=SamplingParams(max_tokens=30, ignore_eos=True), return_text=False)
    client.pause()
    time.sleep(0.05)
    client.resume()
    result = client.push_full(read_model(PUSH_MODEL))
    client.sleep(level=1)
    time.sleep(0.05)
    client.wake()
    client.checksum()
    timeline = client.timeline()
    assert_seamless(timeline)
    spans = engine_spans(timeline)
    order = [span.phase for span in spans if span.phase != "idle"]
    wanted = [
        "load",
        "prefill",
        "decode",
        "paused",
        "push_reserve",
        "push_apply",
        "sleep",
        "asleep",
        "wake",
        "checksum",
    ]
    assert [phase for i, phase in enumerate(order) if i == 0 or order[i - 1] != phase] == wanted
    assert any(span.phase == "idle" for span in spans)
    by_phase = {span.phase: span for span in spans}
    assert sum(span.sampled_tokens for span in spans if span.phase == "decode") == 29
    assert by_phase["paused"].end - by_phase["paused"].start >= 50_000_000
    assert by_phase["sleep"].level == 1 and by_phase["wake"].bytes > 0
    assert by_phase["push_apply"].weight_version == result.weight_version == 1
    assert by_phase["push_apply"].end - by_phase["push_apply"].start >= result.pause_ms * 0.99e6
    pushes = [span for span in timeline.spans if span.track == "push"]
    assert [span.phase for span in pushes] == ["push_receive", "push_verify", "push_commit"]
    assert {span.push for span in pushes} == {by_phase["push_apply"].push} == {1}
    assert pushes[-1].bytes == result.bytes and pushes[-1].weight_version == 1
    assert pushes[-1].start <= by_phase["push_apply"].start <= by_phase["push_apply"].end <= pushes[-1].end + 5_000_000

    samples = scrape(started)
    labels = {"kind": "full", "transport": "inline"}
    assert value(samples, "rollout:push_total", **labels, outcome="applied") == 1
    assert value(samples, "rollout:push_bytes_total", **labels) == result.bytes
    assert value(samples, "rollout:push_pause_seconds_sum", **labels) == pytest.approx(result.pause_ms / 1e3, rel=1e-6)
    assert value(samples, "rollout:push_seconds_count", **labels) == 1
    assert value(samples, "rollout:sleep_seconds_count", level="1") == 1
    assert value(samples, "rollout:wake_seconds_count", reload="false") == 1
    assert value(samples, "rollout:pushes_open") == 0 and value(samples, "rollout:weight_version") == 1

    # The counters of the whole time agree with the spans.
    sums = {key[1][1]: seconds for key, seconds in samples.items() if key[0] == "rollout:engine_seconds_total"}
    for phase in timeline.phases:
        if phase.phase not in WAITING:
            assert sums[phase.phase] >= phase.seconds - 1e-6
    # News since an answer is small, and begins with what lasted then.
    news = client.timeline(since=timeline.now)
    assert engine_spans(news)[0].id == spans[-1].id and news.start == timeline.now


def test_the_timeline_over_http_is_that_of_grpc(started):
    status, content_type, text = http(started, "/timeline.json")
    assert status == 200 and content_type.startswith("application/json")
    over_http, over_grpc = json.loads(text), started.client.timeline()
    assert over_http["started"] == over_grpc.started and not over_http["truncated"]
    first, load = over_http["spans"][0], over_grpc.spans[0]
    assert (first["phase"], first["start"], first["end"]) == ("load", load.start, load.end)
    status, _, text = http(started, f"/timeline.json?since={over_http['now']}&max_spans=1")
    assert status == 200 and len(json.loads(text)["spans"]) == 1
    for query in ["since=x", "max_spans=99999999999", "unknown=1"]:
        status, _, text = http(started, f"/timeline.json?{query}")
        assert status == 400 and json.loads(text)["error"]["message"], query


def test_nobody_waits_for_a_long_step(started):
    """While prompts are computed, each step longer than an answer takes, metrics and timeline see them."""
    client = started.client
    length = min(client.info().max_model_len, 1024)
    deadline = time.monotonic() + 60
    # On a loaded machine this process may get no turn while a call computes; then the call is repeated.
    for call in itertools.count():
        phases, accepted = set(), set()
        prompts = [[(i * 7 + j + call) % 500 for i in range(length)] for j in range(8)]
        thread = threading.Thread(target=lambda prompts=prompts: client.score(prompts))
        thread.start()
        while thread.is_alive():
            phases.add(engine_spans(client.timeline(max_spans=1))[-1].phase)
            accepted.add(value(scrape(started), "rollout:requests_accepted"))
        thread.join()
        if "prefill" in phases and 1 in accepted:
            return
        assert time.monotonic() < deadline, (phases, accepted)


def test_metrics_are_there_while_the_server_sleeps_and_loads(started):
    started.client.sleep(level=2)
    samples = soon(started, lambda s: value(s, "rollout:lifecycle", state="asleep") == 1, "asleep")
    assert value(samples, "rollout:engine_sleep_state", sleep_state="discard_all") == 1
    assert value(samples, "rollout:memory_bytes", use="kv_cache") == 0
    before = value(samples, "rollout:engine_seconds_total", phase="asleep")
    time.sleep(0.05)
    assert value(scrape(started), "rollout:engine_seconds_total", phase="asleep") >= before + 0.05
    started.client.wake(reload=True)
    samples = soon(started, lambda s: value(s, "rollout:lifecycle", state="running") == 1, "awake")
    assert value(samples, "rollout:wake_seconds_count", reload="true") == 1


def test_a_failed_push_is_counted_and_its_spans_end(started):
    client = started.client
    base = read_model(PUSH_MODEL)
    with pytest.raises(Exception, match="expected_version"):
        client.push_full(base, expected_version=7)
    samples = scrape(started)
    labels = {"kind": "full", "transport": "inline"}
    assert value(samples, "rollout:push_total", **labels, outcome="failed") == 1
    assert value(samples, "rollout:push_total", **labels, outcome="applied") == 0
    assert value(samples, "rollout:pushes_open") == 0
    assert all(span.end is not None for span in client.timeline().spans if span.track == "push")


def trace_events(text):
    events = json.loads(text)
    assert {"name": "process_name", "ph": "M", "pid": 1, "tid": 0, "args": {"name": "rollout-server"}} in events
    complete = [event for event in events if event["ph"] == "X"]
    engine = sorted((event for event in complete if event["tid"] == 1), key=lambda event: event["ts"])
    for before, after in itertools.pairwise(engine):
        assert before["ts"] + before["dur"] == pytest.approx(after["ts"], abs=0.01), (before, after)
    return complete


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_trace_file_is_readable_however_the_server_ends(binary, tmp_path, end):
    path = tmp_path / "trace.json"
    with ServerProcess(binary, PUSH_MODEL, [*SMALL_CACHE, "--trace-file", str(path)]) as process:
        process.client.push_full(read_model(PUSH_MODEL))
        process.client.generate([[1, 2, 3]], sampling=SamplingParams(max_tokens=5, ignore_eos=True), return_text=False)
        deadline = time.monotonic() + 30
        while '"decode"' not in path.read_text():
            assert time.monotonic() < deadline, path.read_text()
            time.sleep(0.05)
        process.process.send_signal(end)
        process.process.wait(30)
    text = path.read_text()
    names = {event["name"] for event in trace_events(text if end == signal.SIGTERM else text + "]")}
    assert {"load", "prefill", "decode", "push_receive", "push_apply"} <= names
    assert ("idle" in names and text.endswith("]\n")) or end == signal.SIGKILL


def test_a_trace_file_that_cannot_be_made_ends_the_start(binary, tmp_path):
    log = tmp_path / "log"
    with log.open("w") as output, pytest.raises(Exception, match="status 1"):
        flags = [*SMALL_CACHE, "--trace-file", str(tmp_path)]
        with ServerProcess(binary, PUSH_MODEL, flags, output=output):
            pass
    lines = log.read_text().strip().splitlines()
    assert len(lines) == 1 and f"--trace-file {tmp_path}" in lines[0], lines


def test_a_full_disk_ends_only_the_trace(binary, tmp_path):
    """The file is a pipe whose reader leaves, which fails as a full disk does: at a later write."""
    import os

    path, log = tmp_path / "trace", tmp_path / "log"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with (
        log.open("w") as output,
        ServerProcess(binary, PUSH_MODEL, [*SMALL_CACHE, "--trace-file", str(path)], output=output) as process,
    ):
        os.close(reader)
        deadline = time.monotonic() + 30
        while log.read_text().count("--trace-file") == 0:
            process.client.generate([[1]], sampling=SamplingParams(max_tokens=2), return_text=False)
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        process.client.generate([[1]], sampling=SamplingParams(max_tokens=2), return_text=False)
    assert log.read_text().count("keeps running without it") == 1, log.read_text()
