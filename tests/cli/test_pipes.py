"""The command as a process: plain text in a pipe, colours on a terminal, a reader that closes the pipe."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

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
    except OSError:  # Linux reports this when the other end is closed
        pass
    os.close(ours)
    assert process.wait() == 0
    assert b"\x1b[" in b"".join(chunks) and b"attention_forward" in b"".join(chunks)


def test_a_closed_pipe_causes_no_traceback() -> None:
    process = subprocess.Popen(SHOW, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    process.wait()
    assert b"Traceback" not in errors


def test_errors_go_to_stderr_with_an_exit_status() -> None:
    done = subprocess.run([*SHOW[:4], "casual()"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.startswith("error: ")


VERIFY = [sys.executable, "-m", "flashgen", "verify", "full()", "causal()", "--head-dim", "8", "--emulate"]
BYTES_OF_COLOUR = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


def seen_on_a_terminal(command: list[str], *, stdout_too: bool) -> tuple[bytes, bytes]:
    """Returns what a terminal gets on stderr, and what stdout or a file gets."""
    ours, theirs = pty.openpty()
    where: Any = theirs if stdout_too else subprocess.PIPE
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "160"}
    process = subprocess.Popen(command, cwd=ROOT, stdout=where, stderr=theirs, env=environment)
    os.close(theirs)
    chunks = []
    try:
        while chunk := os.read(ours, 65536):
            chunks.append(chunk)
    except OSError:  # Linux reports this when the other end is closed
        pass
    os.close(ours)
    file = process.stdout.read() if process.stdout else b""
    assert process.wait() == 0
    return b"".join(chunks), file


def test_a_progress_bar_on_the_terminal_does_not_disturb_a_file() -> None:
    seen, file = seen_on_a_terminal(VERIFY, stdout_too=False)
    assert file.startswith(b"spec\tpassed\t") and file.count(b"\tok\n") == 2 and b"\x1b" not in file
    assert b"fp16-d8-full-" in seen and b"fp16-d8-causal-" in seen and b" left " in seen and b"passed\t" not in seen


def test_rows_are_above_the_progress_bar_on_a_terminal() -> None:
    seen, _ = seen_on_a_terminal(VERIFY, stdout_too=True)
    lines = re.split(rb"[\r\n]+", BYTES_OF_COLOUR.sub(b"", seen))
    for name in (b"fp16-d8-full-", b"fp16-d8-causal-"):
        (row,) = [line for line in lines if line.startswith(name) and line.rstrip().endswith(b"ok")]
        assert b" 20 of 20 " in row
    assert any(re.search(rb"fp16-d8-\S+ .* \d+/40 .* left \d", line) for line in lines)


def heeds_ctrl_c() -> None:
    """Restores the signal, which shells ignore for background processes."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_rows_of_verify_are_printed_immediately_and_kept_at_ctrl_c() -> None:
    later = [f"sliding_window({width})" for width in range(1, 20)]  # so that the signal arrives long before the end
    command = [*VERIFY, *later]
    total = 20 * (2 + len(later))
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heeds_ctrl_c
    )
    assert process.stdout is not None
    heading, row = process.stdout.readline(), process.stdout.readline()
    assert process.poll() is None, "runs of the other specs have not finished"
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate()
    assert heading.startswith("spec\tpassed\t") and "\t20 of 20\t" in row and process.returncode == 130
    told = re.search(r"^interrupted: (\d+) of (\d+) passed, (\d+) not run$", errors, re.MULTILINE)
    assert told and int(told[2]) == total and int(told[1]) + int(told[3]) == total and "Traceback" not in errors
    rows = [int(passed) for passed in re.findall(r"\t(\d+) of \1\t", rest)]
    assert sum(rows) == int(told[1]) - 20
