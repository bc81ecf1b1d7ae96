"""How calls of `generate` tell how far they are. That of pushes is in test_pushes.py."""

from __future__ import annotations

import pytest

import rollout_client
from fake_server import completion, summary
from rollout_client import InvalidArgument, RolloutError, _progress


@pytest.fixture
def generating(fake):
    """A server that makes three samples of four, nine and two tokens, and a fourth of one."""

    def generate(request, context):
        for index, tokens in enumerate([4, 9, 2, 1]):
            yield completion(index // 2, index % 2, range(tokens))
        yield summary()

    fake.answers["Generate"] = generate
    return fake


def test_a_function_is_told_of_every_sample(call, generating):
    told = []
    outputs = call(lambda client: client.generate(["a", "b"], n=2, progress=lambda *figures: told.append(figures)))
    assert told == [(1, 4, 4), (2, 4, 13), (3, 4, 15), (4, 4, 16)]
    assert [len(output.samples) for output in outputs] == [2, 2]


def test_it_is_quiet_unless_asked(call, generating, capsys):
    call(lambda client: client.generate(["a", "b"], n=2))
    call(lambda client: client.generate(["a", "b"], n=2, progress=False))
    assert capsys.readouterr() == ("", "")
    call(lambda client: client.generate(["a", "b"], n=2, progress=True))
    line = capsys.readouterr().err
    assert line.startswith("samples: 4 of 4 in ") and "(16 tokens, " in line and line.endswith(" tokens/s)\n")


def test_a_terminal_gets_a_bar_in_one_line(call, generating, capsys, monkeypatch):
    monkeypatch.setattr(_progress, "_BAR_SECONDS", 0.0)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    call(lambda client: client.generate(["a", "b"], n=2, progress=True))
    drawn = capsys.readouterr().err.split("\r\x1b[2K")
    assert [part.count("█") for part in drawn] == [0, 7, 15, 22, 30, 0]
    assert drawn[-1].startswith("samples: 4 of 4") and "\n" not in "".join(drawn[:-1])


def test_a_call_that_fails_says_how_far_it_came_and_raises(call, generating, capsys):
    def generate(request, context):
        yield completion()
        context.abort(rollout_client.ResourceExhausted.code, "too many")

    generating.answers["Generate"] = generate
    with pytest.raises(RolloutError, match="too many"):
        call(lambda client: client.generate(["a"], n=2, progress=True))
    assert capsys.readouterr().err.startswith("samples: 1 of 2 in ")
    with pytest.raises(InvalidArgument, match="n: "):
        call(lambda client: client.generate(["a"], n="2", progress=True))
    assert capsys.readouterr().err == ""
