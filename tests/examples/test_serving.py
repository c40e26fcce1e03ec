"""examples/serve.py: tokens equal those of a pass without a cache, with shared pages, growth and eviction."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the example needs torch: pip install 'flashgen[torch]'")

ROOT = Path(__file__).parents[2]
FEW_PAGES = ("--page-size", "8", "--pages", "8", "--requests", "7", "--prefix", "9", "--new", "30")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports its modules for a single test."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import serve

    yield serve
    for name in [name for name in sys.modules if name.split(".")[0] in ("serve", "serving")]:
        monkeypatch.delitem(sys.modules, name)


def served(monkeypatch: pytest.MonkeyPatch, capsys: Any, example: Any, *arguments: str) -> Any:
    """Returns shared tokens, evictions, and checked tokens for each attention."""
    monkeypatch.setattr(sys, "argv", ["serve.py", "--emulate", "--check", *arguments])
    example.main()
    text = capsys.readouterr().out
    counts = re.findall(r"(\d+) tokens shared, (\d+) evicted\n\w+ +(\d+) tokens checked", text)
    return [tuple(map(int, row)) for row in counts]


@pytest.mark.rotated(8)
@pytest.mark.parametrize("size", [1, 8, 16])
def test_with_pages_and_with_sdpa(monkeypatch: Any, capsys: Any, example: Any, size: int) -> None:
    """Both loops make the same steps, and every token is right."""
    (ours, theirs) = served(monkeypatch, capsys, example, "--page-size", str(size))
    assert ours == theirs and ours[0] > 0 and ours[2] > 0


def test_eviction_when_pages_run_out(monkeypatch: Any, capsys: Any, example: Any) -> None:
    """Evicted sequences continue from their generated tokens, and no token changes."""
    ((shared, evicted, checked),) = served(monkeypatch, capsys, example, *FEW_PAGES, "--attention", "flashgen")
    assert shared and evicted and checked


def test_the_check_detects_a_wrong_token(example: Any) -> None:
    from serving.llama import SIZES, Llama
    from serving.loop import Server
    from serving.pages import Pool
    from serving.state import Request

    torch = sys.modules["torch"]
    model = Llama(SIZES["tiny"], torch.float16, "cpu")
    request = Request(0, [1, 2, 3, 4], 3)
    server = Server(model, example.Dense(model, 1, 256), Pool(8, 4), 1, 256, 8, capture=False)
    right = server.run([request])[0]
    assert example.check(model, [request], {0: right}).startswith("3 tokens checked")
    wrong = [*right[:-1], (right[-1] + 1) % 96]
    with pytest.raises(SystemExit, match="that a pass without a cache does not select"):
        example.check(model, [request], {0: wrong})
    with pytest.raises(SystemExit, match="has lost its prompt"):
        example.check(model, [request], {0: [9, *right[1:]]})


def test_requests_that_never_fit_are_refused(example: Any) -> None:
    from serving.llama import SIZES, Llama
    from serving.loop import Server
    from serving.pages import Pool
    from serving.state import Request

    model = Llama(SIZES["tiny"], sys.modules["torch"].float16, "cpu")
    server = Server(model, example.Dense(model, 1, 256), Pool(2, 4), 1, 256, 8, capture=False)
    with pytest.raises(ValueError, match="request 5 has 9 tokens; the pool has 2 pages of 4"):
        server.run([Request(5, [1] * 6, 3)])
    with pytest.raises(ValueError, match="has 300 tokens; a slot has room for 256"):
        server.run([Request(6, [1] * 290, 10)])


def test_shared_pages(example: Any) -> None:
    from serving.pages import Pool

    pool, prompt = Pool(6, 2), [5, 6, 7, 8, 9]
    first = pool.take(3)
    assert pool.shared(prompt) == []
    pool.publish(prompt, first)
    assert pool.shared(prompt) == first[:2]
    assert pool.shared([5, 6, 7, 8]) == first[:1], "the last token of a prompt is computed"
    assert pool.shared([5, 6, 0, 0, 1]) == first[:1] and pool.shared([7, 8, 5, 6, 1]) == []
    pool.share(first[:2])
    pool.release(first)
    assert pool.free == 4 and pool.shared(prompt) == first[:2]
    pool.release(first[:2])
    assert pool.free == 6 and pool.shared(prompt) == []


def test_pages_behind_a_duplicate_are_not_published(example: Any) -> None:
    """The page before them may be released while they stay."""
    from serving.pages import Pool

    pool, prompt = Pool(6, 2), [5, 6, 7, 8]
    first, second = pool.take(2), pool.take(3)
    pool.publish(prompt, first)
    pool.publish([*prompt, 1, 2], second)
    assert pool.shared([*prompt, 1, 2, 3]) == first
    pool.release(first)
    assert pool.shared([*prompt, 1, 2, 3]) == []


@pytest.mark.gpu
@pytest.mark.parametrize("arguments", [(), FEW_PAGES])
def test_on_a_gpu(arguments: tuple[str, ...]) -> None:
    """Decode steps are captured graphs."""
    command = [sys.executable, str(ROOT / "examples" / "serve.py"), "--size", "tiny", "--check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("tokens checked") == 2, done.stderr
