"""What reaches the terminal: nothing that steers it, nothing that it cannot show, nothing lost without a message."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest
from support.program import fails_cleanly, run

from dflash_cache.cli.console import readable

PROGRAM = "import sys; from dflash_cache.cli import main; sys.argv[0] = 'dflash-cache'; main()"


def _shell(arguments: list[str], redirection: str = "", **environment: str) -> subprocess.CompletedProcess[bytes]:
    command = f'exec "$@" {redirection}'
    everything = ["bash", "-c", command, "sh", sys.executable, "-c", PROGRAM, *arguments]
    return subprocess.run(everything, capture_output=True, env={"PATH": "/usr/bin:/bin", **environment}, check=False)


def test_control_characters_are_shown_not_sent() -> None:
    assert readable("a\x1b[2Jb\x07c\x9b31m\r\n\td") == "a\\x1b[2Jb\\x07c\\x9b31m\\x0d\n\td"


def test_a_documents_control_characters_do_not_reach_the_terminal(target: Path, tmp_path: Path) -> None:
    data, out = tmp_path / "corpus.jsonl", tmp_path / "cache"
    data.write_text(r'{"text": "the target \u001b]0;pwned\u0007 reads\u009b31m"}')
    assert run("extract", "--model", target, "--data", data, "--out", out, "--fc-layers", "0,1,2,3,4").code == 0
    shown = run("inspect", "doc", out, 0).stdout
    assert r"\x1b" in shown and r"\x07" in shown and r"\x9b" in shown
    assert not {"\x1b", "\x07", "\x9b"} & set(shown)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_stream_without_unicode_shows_escapes(extracted: Path, encoding: str) -> None:
    outcome = _shell(["inspect", "doc", str(extracted), "0"], PYTHONIOENCODING=encoding)
    assert outcome.returncode == 0, outcome.stderr.decode()
    assert rb"\u300a" in outcome.stdout


@pytest.mark.parametrize("redirection", [">&-", ">&- 2>&-"])
@pytest.mark.parametrize("more", [[], ["--json"]])
def test_closed_streams_swallow_the_output(extracted: Path, redirection: str, more: list[str]) -> None:
    outcome = _shell(["inspect", "cache", str(extracted), *more], redirection)
    assert (outcome.returncode, outcome.stdout, outcome.stderr) == (0, b"", b"")


def test_a_full_disk_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    monkeypatch.setattr("dflash_cache.demo.model.fetch_demo_model", lambda *_, **__: tmp_path)
    fails_cleanly(run("demo", "--out", tmp_path / "demo"), "the disk is full", "make room")
