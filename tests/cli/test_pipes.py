"""The command as a program: plain text in a pipe, colours on a terminal, a reader that goes away."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHOW = [sys.executable, "-m", "flashgen", "show", "causal()", "--target", "sm_80"]


def test_a_pipe_gets_plain_text() -> None:
    done = subprocess.run(SHOW, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("// flashgen: attention forward") and "\x1b" not in done.stdout
    assert done.stderr == ""


def test_a_terminal_gets_colours() -> None:
    ours, theirs = pty.openpty()
    environment = {key: value for key, value in os.environ.items() if key != "NO_COLOR"} | {"TERM": "xterm-256color"}
    process = subprocess.Popen(SHOW, cwd=ROOT, stdout=theirs, stderr=subprocess.DEVNULL, env=environment)
    os.close(theirs)
    chunks = []
    try:
        while chunk := os.read(ours, 65536):
            chunks.append(chunk)
    except OSError:  # Linux says so when the other end is closed
        pass
    os.close(ours)
    assert process.wait() == 0
    assert b"\x1b[" in b"".join(chunks) and b"attention_forward" in b"".join(chunks)


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    process = subprocess.Popen(SHOW, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    process.wait()
    assert b"Traceback" not in errors


def test_errors_go_to_stderr_and_the_status_says_so() -> None:
    done = subprocess.run([*SHOW[:4], "casual()"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.startswith("error: ")


def test_a_progress_bar_on_the_terminal_leaves_a_file_its_output() -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "flashgen", "verify", "full()", "--head-dim", "8", "--emulate"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=theirs, env=os.environ | {"TERM": "xterm"})
    os.close(theirs)
    seen = os.read(ours, 65536)
    os.close(ours)
    assert done.returncode == 0 and done.stdout.startswith(b"spec\tshape\t")
    assert b"verifying" in seen and b"spec\tshape" not in seen
