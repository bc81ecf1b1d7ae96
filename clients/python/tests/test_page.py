"""The page at `/` in a real browser: what it shows while the server works, and what it never does."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import re
import socket
import tempfile

import numpy as np
import pytest

from browsers import Watched, chromium
from models import random_adapter, read_model
from rollout_client import RolloutClient, RolloutError, SamplingParams, ServerProcess
from rollout_client.process import free_port
from serving import FIXTURES, PUSH_MODEL, SMALL_CACHE
from vllm_answers import ask

HOSTILE = "<img src=x onerror=\"document.title='taken over'\"><script>alert(1)</script>"
USER, OTHER, TRAINER = "user-token-0123456789", "other-token-0123456789", "trainer-token-0123456789"
IMAGE_MODEL = FIXTURES / "qwen2_5_vl"
FEEDS = 32
"""Most feeds that a server has, as docs/observability.md says."""
MOST_ERRORS = 20
"""Errors in the page's list."""


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def served(binary):
    with ServerProcess(binary, PUSH_MODEL, [*SMALL_CACHE, "--mem-util", "0.2"]) as server:
        yield server


@contextlib.contextmanager
def opened(browser, address, complaints=(), **options):
    """The page, which must ask nobody but its server, and complain of nothing else than `complaints`."""
    watched = Watched(browser, **options)
    try:
        watched.page.goto(f"http://{address}/")
        yield watched
        assert watched.hosts() == {address}
        unexpected = [c for c in watched.complaints if not any(re.search(known, c) for known in complaints)]
        assert unexpected == []
    finally:
        watched.context.close()


@contextlib.contextmanager
def batch(client, **options):
    """A request of more samples than run at once, which is ended when it has been looked at."""
    sampling = SamplingParams(max_tokens=900, ignore_eos=True)
    with client.generate_stream([[5, 6, 7]] * 5, n=64, sampling=sampling, return_text=False, **options):
        yield


def rows(watched, table):
    return [row.inner_text() for row in watched.page.query_selector_all(f"#{table} tbody tr")]


def test_it_shows_a_batch_a_push_a_sleep_and_a_wake(browser, served):
    client = served.client
    with opened(browser, served.http_address) as page:
        page.wait_for_text("#lifecycle", "Running")
        assert page.text("#model") == str(PUSH_MODEL) and "float" in page.text("#facts")
        assert "the checkpoint serves" in page.text("#pushes")
        with batch(client):
            page.wait_for_text("#samples", "256 of 256 run")
            page.wait_for_text("#requests", "of 320")
            page.wait_for_text("#phases", "Decode")
            page.wait_for_text("#now", "Decode, 256 samples of 1 request")
        page.wait_for_text("#requests", "None")
        page.wait_for_text("#headline", "Idle")
        assert "no requests" in page.text("#headline")
        assert re.search(r"[1-9][\d,]+ in all", page.text("#rate-more"))
        page.wait_for_text("#failures-more", "1 aborted")
        assert page.text("#push-ends") == ""

        version = client.push_lora(*random_adapter(np.random.default_rng(1), read_model(PUSH_MODEL))).weight_version
        page.wait_for_text("#pushes", "applied")
        assert page.text("#version").startswith(f"version {version} ")
        newest = rows(page, "pushes")[0]
        assert "lora" in newest and "KiB" in newest and "ago" in newest.replace("now", "ago"), newest
        page.wait_for_text("#push-phases", "Receives")
        page.wait_for_text("#push-ends", f"Pushes: version {version}.")

        client.sleep()
        page.wait_for_text("#lifecycle", "Asleep")
        page.wait_for_text("#now", "Asleep for")
        page.wait_for_text("#phases", "Asleep")
        assert page.page.title().startswith("Asleep")
        client.wake()
        page.wait_for_text("#lifecycle", "Running")
        page.wait_for_text("#phases", "Wakes")
        assert "Weights" in page.text("#memory") and "reserved of" in page.text("#memory-sum")


def test_it_shows_images_only_of_a_model_that_takes_them(browser, binary, served, rng):
    with opened(browser, served.http_address) as page:
        page.wait_for_text("#lifecycle", "Running")
        page.wait_for_text("#hits", "of prompt tokens")
        assert not page.page.is_visible("#embeddings") and not page.page.is_visible("#encodes")
    flags = [*SMALL_CACHE, "--mem-util", "0.2", "--max-image-tokens", "16"]
    sampling = SamplingParams(max_tokens=1)
    with ServerProcess(binary, IMAGE_MODEL, flags) as server, opened(browser, server.http_address) as page:
        client = server.client
        placeholder = client.info().images.placeholder
        page.wait_for_text("#embeddings-more", "0 images · 0 of 32 tokens")
        assert page.text("#encodes") == "– found encoded"
        pixels = rng.integers(0, 256, (56, 84, 3), dtype=np.uint8)
        for _ in range(2):
            client.reset_prefix_cache()
            client.generate([[5, placeholder, 7]], images=[[pixels]], sampling=sampling, return_text=False)
        page.wait_for_text("#encodes-more", "1 of 2 found · 1 encoded")
        assert page.text("#encodes") == "50 % found encoded"
        assert page.text("#embeddings-more") == "1 image · 6 of 32 tokens"
        assert page.text("#embeddings") == "19 % in use"


def seconds(words):
    """The seconds of a duration as the page writes it, such as `12 ms median`."""
    number, unit = re.match(r"([\d.]+) (µs|ms|s)\b", words).groups()
    return float(number) * {"µs": 1e-6, "ms": 1e-3, "s": 1}[unit]


def test_it_shows_latencies_drafts_and_errors(browser, served):
    client = served.client
    with opened(browser, served.http_address) as page:
        page.wait_for_text("#lifecycle", "Running")
        sampling = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
        client.generate([[5, 6, 7]], sampling=sampling, return_text=False)
        with pytest.raises(RolloutError, match="temperature"):
            client.generate([[1]], sampling=SamplingParams(temperature=-1))
        tensors = dict(read_model(PUSH_MODEL))
        name, values = tensors.popitem()
        with pytest.raises(RolloutError, match=name):
            client.push_full(tensors | {name: np.full_like(values, np.nan)})
        page.wait_for_text("#failures-more", "1 invalid argument")
        page.wait_for_text("#push-ends", "1 failed")
        page.wait_for_text("#drafts", "accepted")
        for name in ("first_token", "next_token"):
            page.wait_for_text(f"#{name}", "median")
            highest, words = re.fullmatch(r"99th percentile (.+) · (.+)", page.text(f"#{name}-more")).groups()
            assert 0 <= seconds(page.text(f"#{name}")) <= seconds(highest) < 60
            assert words.startswith(("since the start", "in the last "))
        drafted = client.status().drafted_tokens
        page.wait_for_text("#drafts-more", f"of {drafted:,} draft token" if drafted > 0 else "No drafts yet.")


def test_quantiles_are_of_the_time_that_is_shown(browser, served):
    """The module that computes them, with states as the feed brings them: the page must be open for two minutes."""
    script = """async () => {
        const { Latencies } = await import("/page/latencies.js");
        const [second, latencies] = [1e9, new Latencies()];
        latencies.take(0, { x: [[0, 1, 2]] });
        latencies.take(100 * second, { x: [[0, 1, 2], [4, 8, 4], [16, null, 1]] });
        const [all, some] = [latencies.quantiles("x", -1, [0.5, 1]), latencies.quantiles("x", 5 * second, [0.4, 0.99])];
        const none = latencies.quantiles("x", 100 * second, [0.5]);
        for (let i = 0; i < 100; i += 1) latencies.take((101 + i / 100) * second, { x: [] });
        const kept = latencies.states.length;
        latencies.take(2000 * second, { x: [] });
        return [all, some, none, kept, latencies.states.length];
    }"""
    with opened(browser, served.http_address) as page:
        all_, some, none, kept, old = page.page.evaluate(script)
    assert all_ == {"isWhole": True, "values": [5.5, 16]}
    assert some == {"isWhole": False, "values": [6, 16]}
    assert none == {"isWhole": False, "values": [None]}
    assert kept == 4 and old == 2


def test_a_stretch_of_the_timeline_can_be_read(browser, served):
    with opened(browser, served.http_address) as page:
        page.wait_for_text("#headline", "Idle")
        box = page.page.query_selector("#chart").bounding_box()
        page.page.mouse.move(box["x"] + box["width"] - 3, box["y"] + 30)
        page.wait_for_text("#span", "No requests · ")
        page.page.check("text=15 min")
        page.wait_for_text("#headline", "of the last")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_needs_no_scrolling_sideways(browser, served, scheme):
    with opened(browser, served.http_address, color_scheme=scheme, viewport={"width": 400, "height": 800}) as page:
        page.wait_for_text("#lifecycle", "Running")
        assert page.page.evaluate("document.scrollingElement.scrollWidth") <= 400
        ground = page.page.evaluate("getComputedStyle(document.body).backgroundColor")
        shade = sum(map(int, re.findall(r"\d+", ground)[:3]))
        assert shade < 200 if scheme == "dark" else shade > 600


def test_what_clients_choose_is_text(browser, served):
    client = served.client
    with opened(browser, served.http_address) as page:
        page.wait_for_text("#lifecycle", "Running")
        with batch(client, request_id=HOSTILE):
            page.wait_for_text("#requests", "onerror=")
        with pytest.raises(RolloutError):
            client.generate([[1]], sampling=SamplingParams(max_tokens=1), adapter=HOSTILE)
        page.wait_for_text("#errors", "onerror=")
        assert page.page.query_selector_all("main img, main script") == []
        assert page.page.title() != "taken over"


def test_nothing_else_is_loaded_or_run(browser, served):
    answer = ask(served.http_address, "GET", "/")
    assert answer.status == 200 and "default-src 'none'" in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert ask(served.http_address, "GET", "/page/mod.rs").status == 404
    assert ask(served.http_address, "GET", "/page/..%2fpage.html").status == 404
    blocked = ["Content Security Policy", "Refused"]
    with opened(browser, served.http_address, blocked) as page:
        page.wait_for_text("#lifecycle", "Running")
        tried = page.page.evaluate(
            """async () => {
                const script = document.createElement("script");
                script.textContent = "document.title = 'taken over'";
                document.body.append(script);
                const asked = await fetch("http://192.0.2.1/").then(() => "answered", () => "blocked");
                return [document.title, asked];
            }"""
        )
        assert tried[0] != "taken over" and tried[1] == "blocked"


def feed(address, headers=None):
    connection = http.client.HTTPConnection(address, timeout=20)
    connection.request("GET", "/events", headers=headers or {})
    return connection, connection.getresponse()


@contextlib.contextmanager
def admitted_feed(address):
    """An admitted feed. Connections that earlier tests have closed may keep their places for a moment."""
    while True:
        connection, answer = feed(address)
        with contextlib.closing(connection), answer:
            if answer.status == 200:
                yield answer
                return
            assert answer.status == 429, answer.read()


def test_feeds_are_bounded_and_a_hidden_tab_has_none(browser, served):
    with opened(browser, served.http_address) as page, contextlib.ExitStack() as stack:
        page.wait_for_text("#lifecycle", "Running")
        for _ in range(FEEDS - 1):
            answer = stack.enter_context(admitted_feed(served.http_address))
            assert answer.readline().startswith(b'data: {"now":')
        connection, refused = feed(served.http_address)
        assert refused.status == 429 and b"32 feeds are open" in refused.read()
        connection.close()
        hide = "hidden => (Object.defineProperty(document, 'hidden', {value: hidden, configurable: true}), "
        hide += "document.dispatchEvent(new Event('visibilitychange')))"
        page.page.evaluate(hide, True)
        with admitted_feed(served.http_address):
            pass
        page.page.evaluate(hide, False)
        page.wait_for_text("#feed", "Live")


def unread_feed(address):
    """An admitted feed whose reader has little room and does not read."""
    host, _, port = address.rpartition(":")
    while True:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        connection.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        status = connection.recv(12, socket.MSG_PEEK)
        if status.startswith(b"HTTP/1.1 200"):
            return connection
        connection.close()
        assert status.startswith(b"HTTP/1.1 429"), status


def test_feeds_that_nobody_reads_give_way_to_a_new_one(served):
    def refused(number):
        """Adds an error to the list, which is then in the next event of each feed and makes that long."""
        wrong = {"prompt": [1], "max_tokens": f"number {number} " + '"' * 300}
        assert ask(served.http_address, "POST", "/v1/completions", wrong).status == 400

    for number in range(MOST_ERRORS):
        refused(f"-{number}")
    with contextlib.ExitStack() as stack:
        for _ in range(FEEDS - 1):
            stack.enter_context(unread_feed(served.http_address))
        read = stack.enter_context(admitted_feed(served.http_address))
        events, status = [], 429
        while status == 429:
            assert len(events) < 40, (
                f"{FEEDS - 1} feeds have left events of {events} bytes unread, and keep new ones out"
            )
            refused(len(events))
            while f"number {len(events)} ".encode() not in (event := read.readline()):
                assert event, "the feed that is read goes on"
            events.append(len(event))
            connection, new = feed(served.http_address)
            status = new.status
            new.close()
            connection.close()
        assert status == 200
        assert read.readline() == b"\n" and read.readline().startswith(b'data: {"now":'), "it is read, and goes on"


def test_it_survives_a_restart_and_does_not_delay_the_end(browser, binary, monkeypatch):
    ports = [free_port("127.0.0.1"), free_port("127.0.0.1")]
    turns = itertools.cycle(ports)
    monkeypatch.setattr("rollout_client.process.free_port", lambda host: next(turns))
    flags, address = [*SMALL_CACHE, "--mem-util", "0.2"], f"127.0.0.1:{ports[1]}"
    gone = ["ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED_ENCODING"]
    with contextlib.ExitStack() as stack:
        with tempfile.TemporaryFile() as log:
            first = ServerProcess(binary, PUSH_MODEL, flags, output=log)
            first.wait_until_ready()
            page = stack.enter_context(opened(browser, address, gone))
            page.wait_for_text("#lifecycle", "Running")
            assert first.stop() == 0
            log.seek(0)
            said = log.read().decode()
        assert "Drained" in said and "did not close in time" not in said
        page.wait_for_text("#lifecycle", "Not reachable")
        page.wait_for_text("#notice", "nothing new since")
        with ServerProcess(binary, PUSH_MODEL, flags):
            page.wait_for_text("#lifecycle", "Running")
            assert not page.page.is_visible("#notice")


def test_with_a_token(browser, binary, tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text(f"generate {USER}\ngenerate {OTHER}\ncontrol {TRAINER}\n")
    tokens.chmod(0o600)
    flags = [*SMALL_CACHE, "--mem-util", "0.2", "--auth-token-file", str(tokens)]
    with (
        ServerProcess(binary, PUSH_MODEL, flags, token=TRAINER) as server,
        opened(browser, server.http_address, ["401"]) as page,
    ):
        page.wait_for_text("#ask", "wants a token")
        page.page.fill("#token", "nobody-has-this-token")
        page.page.click("text=Show the server")
        page.wait_for_text("#ask-why", "refuses this token")
        assert not page.page.is_visible("main")
        page.page.fill("#token", USER)
        page.page.keyboard.press("Enter")
        page.wait_for_text("#lifecycle", "Running")
        page.page.reload()
        page.wait_for_text("#lifecycle", "Running")
        assert USER not in "".join(page.requests)
        requests_of_two(server, page)
        page.page.click("text=Forget the token")
        page.wait_for_text("#ask", "wants a token")


def requests_of_two(server, page):
    """A token that may generate shows the ids of its own requests, and hides those of others."""
    with contextlib.ExitStack() as stack:
        for token, name in [(USER, "mine"), (OTHER, "theirs")]:
            client = stack.enter_context(RolloutClient(server.address, token=token, timeout=60))
            stack.enter_context(batch(client, request_id=f"this-is-{name}"))
        page.wait_for_text("#requests", "of another token")
        assert "this-is-mine" in page.text("#requests") and "this-is-theirs" not in page.text("#requests")
