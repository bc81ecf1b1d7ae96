"""`rollout status`: on a terminal, in a pipe, as JSON and as a picture, while a server works, goes away and returns."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from dataclasses import replace
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from rich.console import Console

from models import random_adapter, read_model
from rollout_client import ImageInfo, MemoryLedger, PhaseTime, RolloutClient, SamplingParams, Span, Timeline
from rollout_client.cli import main
from rollout_client.cli._monitor import BILLION, Monitor
from rollout_client.cli._status_view import StatusView
from rollout_client.process import free_port
from serving import PUSH_MODEL, SMALL_CACHE, server

BEGIN = 1_700_000_000 * BILLION
PATIENCE = 60.0


class Terminal:
    """The command in a pseudo-terminal of 24 lines; what it has drawn, without the orders to the terminal."""

    def __init__(self, *arguments, columns=100):
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rollout_client.cli", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=subprocess.PIPE,
            env={name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {"TERM": "xterm"},
        )
        os.close(slave)
        self.drawn = b""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.process.stderr.close()
        os.close(self._master)

    def until(self, pattern):
        """Reads on until something is drawn that matches; what came before is forgotten."""
        deadline = time.monotonic() + PATIENCE
        while not (
            found := re.search(pattern, re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", self.drawn).decode(errors="ignore"))
        ):
            left = deadline - time.monotonic()
            assert left > 0 and select.select([self._master], [], [], left)[0], f"{pattern!r} not in {self.drawn!r}"
            self.drawn += os.read(self._master, 1 << 16)
        self.drawn = b""
        return found

    def end(self, by=signal.SIGINT):
        """Ends it by a signal; its exit status and standard error. What it has drawn last is in `drawn`."""
        self.process.send_signal(by)
        with contextlib.suppress(OSError):  # Linux: nobody holds the other end any more
            while select.select([self._master], [], [], PATIENCE)[0] and (part := os.read(self._master, 1 << 16)):
                self.drawn += part
        return self.process.wait(PATIENCE), self.process.stderr.read()


@contextlib.contextmanager
def serving_at(binary, port):
    """A server on this port, which is killed at the end."""
    flags = ["--port", str(port), "--http-port", "off", *SMALL_CACHE, "--mem-util", "0.2"]
    process = subprocess.Popen([str(binary), "--model", str(PUSH_MODEL), *flags])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_terminal_sees_a_batch_a_sleep_a_push_an_outage_and_the_return(binary, rng):
    port = free_port()
    with contextlib.ExitStack() as stack:
        terminal = stack.enter_context(Terminal("status", "--address", f"127.0.0.1:{port}", "--interval", "0.1"))
        terminal.until("no answer for .* no gRPC server answers at")
        first = stack.enter_context(serving_at(binary, port))
        terminal.until("state +running +version 0")
        with RolloutClient(f"127.0.0.1:{port}") as client:
            long = SamplingParams(max_tokens=900, ignore_eos=True)
            with client.generate_stream([[5, 6, 7]] * 4, n=64, sampling=long, return_text=False):
                terminal.until("requests +1 accepted: [0-9]+ samples run")
                terminal.until("tokens/s +[0-9,]*[1-9][0-9,]* generated")
                terminal.until("decode")
            client.sleep(mode="abort")
            terminal.until(r"state +asleep \(level 1\)")
            client.wake(["weights"])
            terminal.until(r"state +asleep \(level 1, weights awake\)")
            client.wake()
            client.push_lora(*random_adapter(rng, read_model(PUSH_MODEL)))
            terminal.until("paused [0-9.]+ ms, version 1")
            with contextlib.suppress(InterruptedError), client.begin_push():
                terminal.until("full .* so far, open for ")
                raise InterruptedError
            terminal.until("full .*, not applied, ")
        first.kill()
        terminal.until("no answer for ")
        stack.enter_context(serving_at(binary, port))
        terminal.until("state +running +version 0")
        terminal.until("pushes +none")
        assert terminal.end() == (130, b"")


@pytest.mark.parametrize(("by", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_terminal_is_left_as_it_was(running, by, status):
    with Terminal("status", "--address", running.address) as terminal:
        terminal.until("state +running")
        assert terminal.end(by) == (status, b"")
        assert b"\x1b[?1049l" in terminal.drawn, "the screen that was there before"
        assert b"\x1b[?25h" in terminal.drawn, "the cursor"


def look(client):
    """A monitor that has looked once."""
    monitor = Monitor(client)
    monitor.look()
    return monitor


@pytest.mark.parametrize("columns", [20, 40, 80, 200])
@pytest.mark.parametrize("unicode", [True, False])
def test_no_line_is_wider_than_the_terminal(push_target, columns, unicode):
    client, _ = push_target
    file = io.StringIO()
    view = StatusView(look(client), client.address, 60.0, width=columns, unicode=unicode)
    Console(file=file, width=columns, force_terminal=False).print(view.render("no answer for 3 s"))
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= columns
    assert unicode or file.getvalue().isascii()
    assert any(line.startswith("memory") for line in lines)


def test_the_hosts_ledger_stands_below_the_devices(running):
    monitor, file = look(running.client), io.StringIO()
    host = MemoryLedger(4 << 30, 2 << 30, {"process": 448 << 20, "offloaded": 1 << 30}, 512 << 20)
    monitor.status = replace(monitor.status, host_memory=host)
    Console(file=file, width=100).print(StatusView(monitor, running.address, 60.0, width=100).render())
    shown = file.getvalue()
    assert not re.search("^memory", shown, re.MULTILINE)
    device, host = (re.search(f"^{name} .*", shown, re.MULTILINE).group() for name in ("device", "host"))
    assert "resident" not in device and "1.4 GiB of 2.0 GiB; 512 MiB resident" in host
    assert "offloaded" in shown and "weights" in shown


def test_images_are_shown_of_a_model_that_takes_them(running):
    monitor = look(running.client)
    counts = {"encoded_images": 1200, "queried_images": 4000, "reused_images": 3000, "held_images": 7}
    monitor.status = replace(monitor.status, **counts)

    def shown():
        file = io.StringIO()
        Console(file=file, width=120).print(StatusView(monitor, running.address, 60.0, width=120).render())
        return file.getvalue()

    assert not re.search("^images", shown(), re.MULTILINE)
    images = ImageInfo(1, most_tokens=1280, token_side=28, placeholder=5, forbidden_token_ids=[5], tile_side=0)
    monitor.info = replace(monitor.info, images=images)
    assert "3,000 of 4,000 found encoded, 1,200 encoded, 7 held" in shown()


def test_into_a_pipe_it_is_shown_once_without_colours(running, capsys):
    assert main(["status", "--address", running.address]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and re.search("^state +running +version 0", out, re.MULTILINE)
    for entry in running.client.status().memory.entries:
        assert entry in out


def test_no_color_is_heeded(running, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert main(["status", "--once", "--address", running.address]) == 0
    assert "\x1b[1;32mrunning" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(["status", "--once", "--address", running.address]) == 0
    assert not re.search("\x1b\\[[0-9;]*3[0-9]", capsys.readouterr().out)


def test_json_has_what_the_client_sees(binary, capsys, rng):
    with server(binary, PUSH_MODEL) as client:
        client.push_lora(*random_adapter(rng, read_model(PUSH_MODEL)), version=5)
        assert main(["status", "--json", "--address", client.address]) == 0
        facts = json.loads(capsys.readouterr().out.splitlines()[-1])
        status, info = client.status(), client.info()
    assert facts["info"]["model"] == info.model
    assert facts["status"]["lifecycle"] == "running" and facts["status"]["weight_version"] == 5
    assert facts["status"]["memory"]["entries"] == status.memory.entries
    (push,) = facts["pushes"]
    assert push["number"] == 1 and push["weight_version"] == 5 and push["bytes"] > 0 and push["pause_seconds"] > 0
    assert sum(facts["phases"].values()) == pytest.approx(1)


def test_the_picture_needs_nothing_else(running, tmp_path):
    picture = tmp_path / "status.svg"
    assert main(["status", "--svg", str(picture), "--address", running.address]) == 0
    text = picture.read_text()
    ElementTree.fromstring(text)
    assert "running" in text and "@font-face" not in text and "href" not in text
    assert "url(" not in text.replace("url(#", "")


def test_without_rich_it_says_what_to_install(running, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    assert main(["status", "--address", running.address]) == 1
    assert "pip install 'rollout-client[cli]'" in capsys.readouterr().err
    assert main(["status", "--json", "--address", running.address]) == 0


class Answers:
    """A server whose clock and spans a test sets."""

    def __init__(self):
        self.started, self.now, self.generated, self.spans, self.update = BEGIN, BEGIN, 0, [], None

    def info(self):
        return SimpleNamespace(server_version="1")

    def status(self):
        return SimpleNamespace(generated_tokens=self.generated, prompt_tokens=0, update=self.update)

    def timeline(self, since=0):
        spans = [span for span in self.spans if span.end is None or span.end > since]
        return Timeline(self.started, since, self.now, False, spans, [])


def span(number, phase, start, end, *, track="engine", parts=(), **facts):
    values = {"steps": 0, "computed_tokens": 0, "sampled_tokens": 0, "weight_version": 0, "bytes": 0, "push": 0}
    times = [BEGIN + round(start * BILLION), None if end is None else BEGIN + round(end * BILLION)]
    return Span(track, number, phase, *times, **(values | facts), level=0, parts=list(parts))


def test_the_strip_has_each_phase_where_it_was():
    client = Answers()
    client.now += 10 * BILLION
    halves = [PhaseTime("decode", 1.0, 0.5), PhaseTime("idle", 1.0, 0.5)]
    client.spans = [
        span(0, "idle", 0, 5.5),
        span(1, "brief", 5.5, 7.5, parts=halves),
        span(2, "decode", 7.5, None),
        span(0, "push_receive", 0, 10, track="push", push=1),
    ]
    strip = look(client).strip(4, 4)
    assert strip == [
        {"decode": pytest.approx(0.5), "idle": pytest.approx(0.5)},
        {"decode": pytest.approx(0.75), "idle": pytest.approx(0.25)},
        {"decode": pytest.approx(1.0)},
        {"decode": pytest.approx(1.0)},
    ]


def test_rates_are_of_the_time_between_two_looks_and_end_with_the_process():
    client = Answers()
    monitor = look(client)
    assert not monitor.rates
    client.now, client.generated = client.now + 2 * BILLION, 500
    monitor.look()
    assert list(monitor.rates) == [250.0]
    client.started, client.generated = client.now, 3
    monitor.look()
    assert not monitor.rates


def test_pushes_are_told_by_their_number_and_keep_the_kind_that_was_seen():
    client = Answers()
    client.now += 10 * BILLION
    client.update = SimpleNamespace(id=2, kind="lora", adapter="math")
    client.spans = [
        span(0, "push_apply", 2.5, 2.75, push=1, weight_version=7),
        span(0, "push_receive", 1, 2, track="push", push=1),
        span(1, "push_commit", 2, 3, track="push", push=1, bytes=99),
        span(2, "push_receive", 9, None, track="push", push=2),
    ]
    second, first = look(client).pushes(5)
    assert (first.number, first.bytes, first.seconds, first.weight_version) == (1, 99, 2.0, 7)
    assert first.pause_seconds == 0.25 and first.kind is None
    assert (second.kind, second.adapter, second.seconds, second.weight_version) == ("lora", "math", 1.0, None)
    assert second.is_open and not first.is_open
