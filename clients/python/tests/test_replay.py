"""Receipts and replay: every bit again, after restarts too, and the right reason for each that is not."""

from __future__ import annotations

import json
import re
import threading
from dataclasses import replace

import numpy as np
import pytest

from models import perturbed, random_adapter, read_model
from rollout_client import (
    Aborted,
    Chat,
    FinishReason,
    InvalidArgument,
    PermissionDenied,
    PromptImage,
    RolloutClient,
    SamplingParams,
    ServerProcess,
)
from rollout_client.cli import main
from rollout_client.replay import (
    Receipt,
    Recorder,
    RecordingClient,
    SpanReceipt,
    Verdict,
    parse_receipt,
    read_receipts,
    replay,
)
from serving import LONG, PUSH_MODEL, SMALL_CACHE, wait_for

FLAGS = [*SMALL_CACHE, "--mem-util", "0.2", "--max-adapters", "2"]
GENERATE_TOKEN, CONTROL_TOKEN = "generate-token-0123456789", "control-token-0123456789"
SHORT = SamplingParams(max_tokens=12, ignore_eos=True)
EDITED = SamplingParams(
    temperature=0.7,
    top_k=40,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.2,
    presence_penalty=0.5,
    frequency_penalty=-0.25,
    logit_bias={7: 2.5, 9: -1.0},
    allowed_token_ids=range(3, 300),
    min_tokens=3,
    max_tokens=24,
    stop_token_ids=(11,),
    stop=["th", "e"],
)


@pytest.fixture
def serving(binary):
    """A server of the model of pushes, new for the test."""
    with ServerProcess(binary, PUSH_MODEL, FLAGS) as process:
        yield process.client


@pytest.fixture
def path(tmp_path):
    return tmp_path / "samples.jsonl"


@pytest.fixture
def adapters(rng):
    """Two adapters: tensors and configuration of each."""
    base = read_model(PUSH_MODEL)
    return [random_adapter(rng, base) for _ in range(2)]


def record(client, path, prompts=((1, 2, 3), (4, 5)), n=3, sampling=SHORT, **options):
    with Recorder(client, path) as recorder:
        return recorder.generate([list(prompt) for prompt in prompts], n, sampling, **options)


def command(client, path, capsys, *options):
    """Exit status, lines of standard output, standard error."""
    capsys.readouterr()
    status = main(["replay", str(path), "--address", client.address, *options])
    captured = capsys.readouterr()
    return status, captured.out.splitlines(), captured.err


def forged(path, line, change):
    """Writes a receipt anew as if it had been recorded so."""
    receipts = list(read_receipts(path))
    receipts[line - 1] = change(receipts[line - 1])
    path.write_text("".join(f"{receipt.to_json()}\n" for receipt in receipts))


def test_every_bit_comes_again_after_a_restart(binary, path, adapters, capsys):
    """All kinds of prompts and parameters, two policies and a resident adapter, on a server that was started anew."""
    choice = SamplingParams(structured_outputs={"choice": ["yes", "no", "maybe"]})
    prompts = ["Once upon a time", [5, 6, 7], Chat([{"role": "user", "content": "Hello"}])]
    with ServerProcess(binary, PUSH_MODEL, FLAGS) as server, Recorder(server.client, path) as recorder:
        recorder.generate(prompts, 4, EDITED, note={"step": 0})
        recorder.generate(prompts, 2, choice)
        recorder.generate(prompts, 1, SamplingParams(temperature=0))
        recorder.generate(prompts, 2, [SHORT, replace(SHORT, max_tokens=3, seed=5), EDITED])
        server.client.push_lora(*adapters[0], name="math")
        recorder.generate(prompts, 2, SHORT, adapter="math")
        before = server.client.status().weight_version
        server.client.push_lora(*adapters[1], version=before + 7)
        recorder.generate(prompts, 2, SHORT)
        assert command(server.client, path, capsys, "--weight-version", str(before + 7))[0] == 0
    receipts = list(read_receipts(path))
    assert [receipt.line for receipt in receipts] == list(range(1, 3 * 13 + 1))
    assert receipts[0].note == {"step": 0} and receipts[0].sampling.stop == ["th", "e"]
    with ServerProcess(binary, PUSH_MODEL, FLAGS) as server:
        server.client.push_lora(*adapters[0], name="math")
        status, out, _ = command(server.client, path, capsys, "--weight-version", str(before))
        assert (status, out[0]) == (0, f"version {before}: 33 samples: 33 the same bits")
        # The same weights under another number.
        server.client.push_lora(*adapters[1])
        assert server.client.status().weight_version != before + 7
        status, out, _ = command(server.client, path, capsys, "--weight-version", str(before + 7))
        assert (status, out[0]) == (0, f"version {before + 7}: 6 samples: 6 the same bits")


def test_after_another_push_the_version_is_named(serving, path, adapters, capsys):
    serving.push_lora(*adapters[0], version=7)
    record(serving, path)
    serving.push_lora(*adapters[1], version=8)
    record(serving, path)
    status, out, _ = command(serving, path, capsys)
    assert status == 1
    assert out[0].startswith("version 7: 6 samples: ") and " differ" in out[0]
    assert re.search(r"made by the weights of version 7 \(\w{12}…\), but the server has version 8 \(", out[1])
    assert re.match(r"    line 1, prompt 0, sample 0, token \d+: ", out[2])
    assert "version 8: 6 samples: 6 the same bits" in out
    report = replay(serving, read_receipts(path))
    differing = [result for result in report.results if result.verdict is Verdict.DIFFERS]
    assert {result.weight_version for result in differing} == {7} and not report.same
    serving.push_lora(*adapters[0], version=9)
    assert command(serving, path, capsys, "--weight-version", "7")[0] == 0


def test_a_sample_across_a_push_comes_again_up_to_it(serving, path, adapters, capsys):
    serving.push_lora(*adapters[0], version=1)
    recording = threading.Thread(target=record, args=(serving, path, [[5, 6, 7]], 8, LONG))
    recording.start()
    wait_for(serving, lambda s: s.generated_tokens > 20 and s.running_samples == 8, "generating")
    serving.pause("keep")
    serving.push_lora(*adapters[1], version=2)
    serving.resume()
    recording.join(120)
    receipts = list(read_receipts(path))
    assert all([span.weight_version for span in receipt.spans] == [1, 2] for receipt in receipts)
    assert all(span.weights for receipt in receipts for span in receipt.spans)
    status, out, _ = command(serving, path, capsys)
    assert status == 1 and "made by the weights of version 1 " in out[1] and "the server has version 2 " in out[1]
    serving.push_lora(*adapters[0], version=3)
    status, out, _ = command(serving, path, capsys)
    assert (status, out[0]) == (0, "version 1: 8 samples: 8 the same bits up to a push")
    report = replay(serving, receipts)
    assert [(result.verdict, result.token, result.weight_version) for result in report.results] == [
        (Verdict.SAME_UNTIL_PUSH, receipt.spans[0].end, 2) for receipt in receipts
    ]


def test_an_aborted_sample_is_compared_as_far_as_it_went(serving, path):
    with Recorder(serving, path) as recorder:
        sampling = replace(LONG, min_tokens=800)
        recording = threading.Thread(target=recorder.generate, args=([[5, 6, 7]], 8, sampling))
        recording.start()
        wait_for(serving, lambda s: s.generated_tokens > 20 and s.running_samples == 8, "generating")
        serving.abort(all=True)
        recording.join(120)
    receipts = list(read_receipts(path))
    assert {receipt.finish_reason for receipt in receipts} == {FinishReason.ABORTED}
    assert all(0 < len(receipt.token_ids) < LONG.max_tokens for receipt in receipts)
    assert {result.verdict for result in replay(serving, receipts).results} == {Verdict.SAME}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda r: replace(r, token_ids=[*r.token_ids[:4], r.token_ids[4] ^ 1, *r.token_ids[5:]]),
            "4: now .*, was",
        ),
        (lambda r: replace(r, raw_logprobs=flipped(r.raw_logprobs, 6)), "6: raw log-probability now .*, was"),
        (lambda r: replace(r, logprobs=flipped(r.logprobs, 0)), "0: log-probability now .*, was"),
        (lambda r: shortened(r, 5), "5: now [0-9]+, was missing"),
        (lambda r: replace(r, sampling=replace(r.sampling, max_tokens=9)), "9: missing .*, was [0-9]+"),
        (lambda r: replace(r, finish_reason=FinishReason.EOS), "11: now ends the sample by length, ended it by eos"),
    ],
)
def test_a_forged_receipt_is_found_at_its_token(serving, path, capsys, change, told):
    """Forged with the digest made anew; the second of three samples."""
    record(serving, path, prompts=[[1, 2, 3]])
    forged(path, 2, change)
    status, out, _ = command(serving, path, capsys)
    assert (status, out[0]) == (1, "version 0: 3 samples: 2 the same bits, 1 differ")
    assert "the receipt was changed, or this is a bug" in out[1]
    assert re.match(f"    line 2, prompt 0, sample 1, token {told}", out[2]), out[2]


def test_a_server_without_batch_invariance_is_not_a_bug(serving, path, capsys, monkeypatch):
    record(serving, path, prompts=[[1, 2, 3]])
    forged(path, 2, lambda r: replace(r, raw_logprobs=flipped(r.raw_logprobs, 6)))
    info = RolloutClient.info
    monkeypatch.setattr(RolloutClient, "info", lambda self: replace(info(self), batch_invariant=False))
    _, out, _ = command(serving, path, capsys)
    assert "a server without batch invariance (--attention flash" in out[1]


def flipped(values, at):
    """The last bit of one float is another."""
    bits = values.copy().view(np.uint32)
    bits[at] ^= 1
    return bits.view(np.float32)


def shortened(receipt, count):
    return replace(
        receipt,
        token_ids=receipt.token_ids[:count],
        logprobs=receipt.logprobs[:count],
        raw_logprobs=receipt.raw_logprobs[:count],
        spans=[replace(receipt.spans[0], end=count)],
    )


def test_lines_that_are_no_receipts_are_named_and_the_others_replayed(serving, path, capsys):
    record(serving, path, prompts=[[1, 2, 3]], n=6)
    lines = path.read_text().splitlines()
    lines[1] = lines[1][: len(lines[1]) // 2]
    lines[2] = lines[2].replace('"sample_index": 2', '"sample_index": 3')
    lines[3] = json.dumps({"hello": "world"})
    lines[4] = "\x00\ufffd"
    path.write_text("\n".join([*lines, "", "[]"]))
    status, out, error = command(serving, path, capsys)
    assert (status, out[0]) == (1, "version 0: 2 samples: 2 the same bits")
    told = error.splitlines()
    assert [re.findall("line ([0-9]+): (not JSON|changed|not a receipt)", line) for line in told] == [
        [("2", "not JSON")],
        [("3", "changed")],
        [("4", "not a receipt")],
        [("5", "not JSON")],
        [("8", "not a receipt")],
    ]
    with pytest.raises(InvalidArgument, match=re.escape(f"{path}, line 2: ")):
        list(read_receipts(path))
    status, out, error = command(serving, path, capsys, "--line", "1", "--json")
    assert (status, error) == (0, "") and [json.loads(line)["verdict"] for line in out] == ["same"]
    status, out, error = command(serving, path, capsys, "--line", "7")
    assert (status, out) == (1, []) and "no receipts" in error
    status, _, error = command(serving, path.with_name("nothing"), capsys)
    assert status == 1 and "No such file" in error


def test_a_line_that_was_cut_off_costs_no_other(serving, path):
    """The process was killed as it wrote."""
    record(serving, path, prompts=[[1, 2, 3]], n=2)
    path.write_text(path.read_text()[:-20])
    record(serving, path, prompts=[[1, 2, 3]], n=2)
    lines = path.read_text().splitlines()
    assert len(lines) == 4 and path.read_text().endswith("\n")
    assert [parse_receipt(lines[i]).sample_index for i in (0, 2, 3)] == [0, 0, 1]


@pytest.mark.parametrize("line", ["[" * 100_000, '{"note": ' * 100_000], ids=["lists", "objects"])
def test_a_line_that_is_nested_too_deeply_is_named(serving, path, capsys, line):
    record(serving, path, prompts=[[1, 2, 3]], n=1)
    with path.open("a") as file:
        file.write(f"{line}\n")
    status, out, error = command(serving, path, capsys)
    assert (status, out[0]) == (1, "version 0: 1 sample: 1 the same bits")
    assert error == f"rollout: {path}, line 2: not a receipt: its JSON is nested too deeply\n"


def test_a_note_that_is_nested_too_deeply_is_refused():
    note = []
    for _ in range(100_000):
        note = [note]
    with pytest.raises(InvalidArgument, match="note: nested too deeply"):
        example(note=note).to_json()


@pytest.mark.parametrize(
    "broken",
    [
        {"token_ids": [1, 2]},
        {"token_ids": [1, 2.5, 3]},
        {"logprobs": [0.5, "x", 1.0]},
        {"spans": [{"weight_version": 0, "start": 1, "end": 3, "weights": None}]},
        {"spans": []},
        {"finish_reason": "bored"},
        {"sampling": {"warmth": 1, "seed": 3}},
        {"sampling": {"seed": None}},
        {"sampling": {"seed": 1 << 64}},
        {"server": None},
        {"images": [{"hash": "../x", "width": 28, "height": 28, "first_token": 0, "tokens": 1}]},
        {"images": [{"hash": "ab" * 32, "width": 28.5, "height": 28, "first_token": 0, "tokens": 1}]},
        {"images": [{"hash": "ab" * 32}]},
    ],
)
def test_a_receipt_that_makes_no_sense_is_refused(broken):
    with pytest.raises(InvalidArgument, match="not a receipt"):
        parse_receipt(signed(json.loads(example().to_json()) | broken))


def test_receipts_of_version_1_are_replayed(serving, path):
    record(serving, path)
    contents = [json.loads(line) for line in path.read_text().splitlines()]
    assert {content["format"] for content in contents} == {"rollout-receipt/2"}
    for content in contents:
        assert content.pop("images") == [] and content.pop("routing") is None
        content["format"] = "rollout-receipt/1"
    path.write_text("".join(f"{signed(content)}\n" for content in contents))
    assert replay(serving, read_receipts(path)).same


def signed(content):
    """A line with the digest made anew."""
    from rollout_client.replay._receipt import _digest

    rest = {key: value for key, value in content.items() if key != "digest"}
    return json.dumps(rest | {"digest": _digest(rest)})


def example(**values):
    given = {
        "server": {"model": "m"},
        "prompt_index": 0,
        "sample_index": 1,
        "prompt_token_ids": [4, 5],
        "sampling": SamplingParams(seed=7),
        "adapter": None,
        "adapter_generation": None,
        "spans": [SpanReceipt(0, 0, 2, "ab"), SpanReceipt(9, 2, 3, None)],
        "token_ids": [1, 2, 3],
        "logprobs": np.float32([-0.5, -1, -2]),
        "raw_logprobs": np.float32([-0.25, -3, -4]),
        "finish_reason": FinishReason.LENGTH,
    }
    return Receipt(**(given | values))


def test_a_receipt_is_read_as_it_was_written(rng):
    """All bit patterns of float32 but the NaNs' payloads, and values of numpy among the parameters."""
    values = rng.integers(0, 1 << 32, 3000, np.uint32).view(np.float32)
    edges = np.float32([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-38, 3.4028235e38, 0.1])
    floats = np.concatenate([np.where(np.isnan(values), np.float32(np.nan), values), edges])
    count = len(floats)
    sampling = SamplingParams(
        seed=(1 << 64) - 1,
        temperature=np.float32(0.1),
        logit_bias={np.int64(3): np.float32(0.3)},
        allowed_token_ids=np.arange(5),
        stop=("é\n", '"'),
        structured_outputs={"json": {"type": "object"}},
    )
    written = example(
        token_ids=list(range(count)),
        logprobs=floats,
        raw_logprobs=floats[::-1],
        spans=[SpanReceipt(3, 0, count, None)],
        sampling=sampling,
        images=[PromptImage("0f" * 32, 84, 56, 1, 6, 1)],
        routing="0f" * 32,
        note={"步": [1, None, {"2": 0.1}]},
    )
    line = written.to_json()
    read = parse_receipt(line, 4)
    assert "\n" not in line and read.line == 4
    assert read.logprobs.tobytes() == written.logprobs.tobytes()
    assert read.raw_logprobs.tobytes() == np.ascontiguousarray(written.raw_logprobs).tobytes()
    assert read.note == written.note and read.spans == written.spans and read.to_json() == line
    assert read.images == written.images and read.routing == written.routing
    assert read.sampling.logit_bias == {3: float(np.float32(0.3))} and read.sampling.seed == (1 << 64) - 1
    assert read.sampling.temperature == float(np.float32(0.1))
    json.loads(line, parse_constant=pytest.fail)
    with pytest.raises(InvalidArgument, match="note"):
        example(note={1, 2}).to_json()


def test_an_adapter_that_is_gone_or_another_is_told(serving, path, adapters, capsys):
    serving.push_lora(*adapters[0], name="math")
    record(serving, path, adapter="math")
    assert command(serving, path, capsys)[0] == 0
    serving.push_lora(*adapters[1], name="math")
    status, out, _ = command(serving, path, capsys)
    assert status == 1 and "made with generation 1 of the adapter 'math'" in out[1]
    serving.remove_adapter("math")
    status, out, _ = command(serving, path, capsys)
    assert status == 1 and "6 refused" in out[0] and "math" in out[2]


def test_a_client_records_for_trainers_that_call_it_themselves(serving, path):
    with RecordingClient(serving.address, timeout=60, record=path) as client:
        client.recorder.note = {"run": 3}
        threads = [threading.Thread(target=client.generate, args=([[1, 2, 3]], 8, SHORT)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        outputs = client.generate(["one"], 2, SHORT, adapter=None)
        client.recorder.note = None
        client.generate([[4]], 1, SHORT)
        serving.sleep()
        client.recorder.add(outputs, SHORT)
    receipts = list(read_receipts(path))
    assert [receipt.note for receipt in receipts] == [{"run": 3}] * 34 + [None] * 3
    assert all(span.weights for receipt in receipts for span in receipt.spans)
    serving.wake()
    assert replay(serving, receipts).same


def test_a_request_that_is_ended_early_is_no_difference(serving, path):
    """A paused server, which answers with nothing when the time has passed."""
    record(serving, path)
    serving.pause()
    with RolloutClient(serving.address, timeout=0.5) as client:
        report = replay(client, read_receipts(path))
    assert {result.verdict for result in report.results} == {Verdict.REFUSED} and not report.same
    serving.resume()
    assert replay(serving, read_receipts(path)).same


def test_a_push_in_the_middle_ends_the_replay(serving, path, adapters):
    record(serving, path, n=40)
    pushes = iter([lambda: serving.push_lora(*adapters[0])])
    with pytest.raises(Aborted, match="a push came during the replay"):
        replay(serving, read_receipts(path), lambda _: next(pushes, lambda: None)())


def test_each_version_costs_one_checksum_and_the_digest_is_of_its_weights(serving, path, adapters, monkeypatch):
    import rollout_client.replay._recorder as recorder_module

    asked, digest = [], recorder_module.weights_digest
    monkeypatch.setattr(recorder_module, "weights_digest", lambda client: asked.append(digest(client)) or asked[-1])
    base = read_model(PUSH_MODEL)
    with Recorder(serving, path) as recorder:
        for _ in range(3):
            recorder.generate([[1, 2]], 2, SHORT)
        assert [version for version, _ in asked] == [0]
        serving.push_full(perturbed(np.random.default_rng(1), base), version=4)
        outputs = recorder.generate([[1, 2]], 2, SHORT)
        assert [version for version, _ in asked] == [0, 4]
        serving.push_lora(*adapters[0], version=5)
        recorder.add(outputs, SHORT)
    spans = [receipt.spans[0] for receipt in read_receipts(path)]
    assert [(span.weight_version, span.weights) for span in spans] == [asked[0]] * 6 + [asked[1]] * 4
    assert len({digest for _, digest in asked}) == 3


def test_with_a_token_for_generation_only_versions_are_recorded(binary, path, adapters, capsys, monkeypatch):
    tokens, alone = path.with_name("tokens"), path.with_name("token")
    tokens.write_text(f"generate {GENERATE_TOKEN}\ncontrol {CONTROL_TOKEN}\n")
    alone.write_text(GENERATE_TOKEN)
    monkeypatch.setenv("ROLLOUT_TOKEN_FILE", str(alone))
    flags = [*FLAGS, "--auth-token-file", str(tokens)]
    with ServerProcess(binary, PUSH_MODEL, flags, token=CONTROL_TOKEN) as server:
        with RolloutClient(server.address, token=GENERATE_TOKEN) as client:
            with Recorder(client, path) as recorder, pytest.raises(PermissionDenied):
                recorder.generate([[1, 2]], 2, SHORT)
            with Recorder(client, path, digests=False) as recorder:
                recorder.generate([[1, 2]], 2, SHORT)
            assert [receipt.spans[0].weights for receipt in read_receipts(path)] == [None, None]
            assert command(client, path, capsys)[0] == 0
            server.client.push_lora(*adapters[0], version=0 + 1)
            status, out, _ = command(client, path, capsys)
        assert status == 1 and "made by the weights of version 0, but the server has version 1:" in out[1]
