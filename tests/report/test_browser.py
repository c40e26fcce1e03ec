"""Reports and documentation pages in a real browser: behaviour, requests, and layout."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from flashgen.cli.app import app

ROOT = Path(__file__).parents[2]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((found for found in map(shutil.which, BROWSERS) if found), None)
pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason=f"needs a browser: none of {', '.join(BROWSERS)} is on the PATH"),
    pytest.mark.skipif(
        importlib.util.find_spec("playwright") is None, reason="needs playwright: pip install '.[browser]'"
    ),
    pytest.mark.slow,
]
WIDTHS = (1400, 900, 380)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a report of a mask that differs between heads, so that there is a map to select."""
    folder = tmp_path_factory.mktemp("report")
    (folder / "by_head.py").write_text("def by_head(b, h, q, k):\n    return (q >= k) & (q - k < 64 + 64 * h)\n")
    path = folder / "report.html"
    words = f"report {folder / 'by_head.py'}:by_head --target sm_80 --len-q 1024 --heads 3 --output {path}"
    result = CliRunner().invoke(app, shlex.split(words))
    assert result.exit_code == 0, result.output
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def problems() -> list[str]:
    return []


@pytest.fixture
def page(browser: Any, report: Path, problems: list[str]) -> Iterator[Any]:
    """Returns the open report; console errors and requests beyond the file are recorded in `problems`."""
    opened = open_page(browser, problems)
    opened.goto(report.as_uri())
    yield opened
    opened.close()
    assert problems == []


def open_page(browser: Any, problems: list[str], width: int = 1200, scheme: str = "light") -> Any:
    opened = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    opened.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    opened.on("pageerror", lambda error: problems.append(str(error)))
    elsewhere = ("file:", "data:")
    opened.on("request", lambda asked: None if asked.url.startswith(elsewhere) else problems.append(asked.url))
    # An image that is still loading when a test moves to the next page is cancelled.
    given_up = "net::ERR_ABORTED"
    opened.on("requestfailed", lambda asked: problems.append(asked.url) if asked.failure != given_up else None)
    return opened


def test_it_opens_without_errors_and_requests(page: Any) -> None:
    assert page.title().endswith("a flashgen report")
    assert page.locator("math").count() > 5 and page.locator("svg").count() > 3


def test_folds_open_and_close(page: Any) -> None:
    kernel = page.locator(f"#{page.locator('details.kernel:not([open])').first.get_attribute('id')}")
    kernel.locator("summary").first.click()
    assert kernel.get_attribute("open") is not None
    page.click("#fold")
    assert page.locator("details:not([open])").count() == 0
    page.click("#fold")
    assert page.locator("details[open]").count() == 0


def test_a_link_from_a_step_opens_and_shows_its_line(page: Any) -> None:
    link = page.locator("details.kernel[open] table a").first
    target = link.get_attribute("href")
    line = page.locator(target)
    assert not line.is_visible()
    link.click()
    line.wait_for(state="visible")
    assert "here" in line.get_attribute("class")
    page.wait_for_function("element => element.getBoundingClientRect().top < innerHeight", arg=line.element_handle())
    name = link.locator("code").inner_text()
    assert f"{name}(" in line.inner_text()


def test_a_bar_of_the_timeline_leads_to_its_line(page: Any) -> None:
    bar = page.locator(".drawn svg a").first
    target = bar.get_attribute("href")
    bar.dispatch_event("click")
    page.locator(target).wait_for(state="visible")


def test_the_map_zooms_by_buttons_keys_and_wheel(page: Any) -> None:
    tiles = page.locator(".tiles").first
    frame = tiles.locator(".frame")

    def zoom() -> float:
        return float(tiles.get_attribute("data-zoom"))

    assert zoom() == 1
    tiles.locator("button", has_text="Zoom in").click()
    assert zoom() == 2
    shown = tiles.locator(".place:not([hidden]) svg").get_attribute("viewBox")
    assert shown == "256 256 512 512"
    frame.focus()
    page.keyboard.press("ArrowUp")
    assert tiles.locator(".place:not([hidden]) svg").get_attribute("viewBox") == "256 128 512 512"
    page.keyboard.press("-")
    assert zoom() == 1
    page.keyboard.press("+")
    page.keyboard.press("0")
    assert zoom() == 1
    frame.hover()
    page.mouse.wheel(0, -100)
    page.wait_for_function("element => Number(element.dataset.zoom) > 1", arg=tiles.element_handle())
    tiles.locator("button", has_text="Whole").click()
    assert zoom() == 1


def test_the_map_describes_the_tile_under_the_pointer_and_follows_the_head(page: Any) -> None:
    tiles = page.locator(".tiles").first
    bounds = tiles.locator(".frame").bounding_box()
    page.mouse.move(bounds["x"] + 2, bounds["y"] + 2)
    said = tiles.locator(".said").inner_text()
    assert said.startswith("tile 0,0, partial: queries 0 to ")
    page.mouse.move(bounds["x"] + bounds["width"] - 2, bounds["y"] + 2)
    assert ", empty: " in tiles.locator(".said").inner_text()
    tiles.locator("select").select_option("2")
    assert "head 2 of 3" in tiles.locator(".said").inner_text()
    assert tiles.locator(".place:not([hidden])").count() == 1
    assert "head 2" in tiles.locator(".place:not([hidden])").get_attribute("data-summary")


def test_a_partial_tile_shows_its_elements(page: Any) -> None:
    tiles = page.locator(".tiles").first
    canvas = tiles.locator("canvas.tile")
    bounds = tiles.locator(".frame").bounding_box()
    page.mouse.click(bounds["x"] + 2, bounds["y"] + 2)
    rows, columns = (int(tiles.get_attribute(f"data-tile-{axis}")) for axis in "qk")
    distance = np.arange(rows)[:, None] - np.arange(columns)
    kept = (distance >= 0) & (distance < 64)
    assert f"keeps {100 * kept.mean():.1f}% of its elements" in tiles.locator(".said").inner_text()
    blue = canvas.evaluate(
        "each => [...each.getContext('2d').getImageData(0, 0, each.width, each.height).data]"
        ".filter((_, at) => at % 4 == 0)"
    )
    assert (np.array(blue).reshape(rows, columns) == 0x2B).tolist() == kept.tolist()
    page.mouse.click(bounds["x"] + bounds["width"] - 2, bounds["y"] + 2)
    assert not canvas.is_visible()
    tiles.locator(".frame").focus()
    page.keyboard.press("Enter")
    assert canvas.is_visible() is (", partial:" in tiles.locator(".said").inner_text())


def test_ticks_follow_the_zoom(page: Any) -> None:
    tiles = page.locator(".tiles").first
    assert tiles.locator(".across span").all_inner_texts() == [str(at) for at in range(0, 1025, 128)]
    tiles.locator("button", has_text="Zoom in").click()
    assert tiles.locator(".across span").all_inner_texts() == [str(at) for at in range(256, 769, 64)]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark(browser: Any, report: Path, problems: list[str], scheme: str) -> None:
    """The page follows the system, the button switches it; the contrast of text is at least 4.5 to 1 (WCAG, AA)."""
    opened = open_page(browser, problems, scheme=scheme)
    opened.goto(report.as_uri())
    assert opened.evaluate("document.documentElement.dataset.theme") == scheme
    for _ in range(2):
        for selector in ("body", ".soft", "a[href]", ".ok", ".source .line"):
            assert contrast(opened, selector) >= 4.5, selector
        opened.click("#theme")
    opened.close()
    assert problems == []


CONTRAST = """
selector => {
  const element = document.querySelector(selector);
  const light = colour => {
    const parts = colour.match(/[0-9.]+/g).slice(0, 3).map(Number).map(part => part / 255);
    const linear = parts.map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  };
  const ink = light(getComputedStyle(element).color), paper = light(getComputedStyle(document.body).backgroundColor);
  return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
}
"""


def contrast(page: Any, selector: str) -> float:
    return float(page.evaluate(CONTRAST, selector))


@pytest.mark.parametrize("width", WIDTHS)
def test_wide_and_narrow(browser: Any, report: Path, problems: list[str], width: int) -> None:
    """Nothing makes the page wider than the window; wide elements scroll by themselves."""
    opened = open_page(browser, problems, width)
    opened.goto(report.as_uri())
    opened.click("#fold")
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    opened.close()
    assert problems == []


def test_the_keyboard_reaches_everything(page: Any) -> None:
    """By Tab, with a visible focus at each element."""
    kinds = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        kinds.add(page.evaluate("document.activeElement.tagName + (document.activeElement.className ? '.frame' : '')"))
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    assert {"A", "BUTTON", "SELECT", "DIV.frame"} <= {kind.replace("A.frame", "A") for kind in kinds}


def test_images_have_names(page: Any) -> None:
    unnamed = page.evaluate(
        "[...document.querySelectorAll('[role=img]')].filter(each => !each.getAttribute('aria-label')).length"
    )
    assert unnamed == 0 and page.locator("[role=img]").count() >= 4
    assert page.locator("html").get_attribute("lang") == "en" and page.locator("main").count() == 1


def test_it_prints_with_its_kernels_open_and_without_its_buttons(page: Any) -> None:
    page.emulate_media(media="print")
    assert not page.locator("#fold").is_visible()
    printed = page.pdf()
    assert printed.startswith(b"%PDF") and printed.count(b"/Type /Page") > 3


def test_two_side_by_side(browser: Any, tmp_path: Path, problems: list[str]) -> None:
    path = tmp_path / "both.html"
    words = f'report --compare "causal()" "full()" --pass forward --no-run --target sm_80 --output {path}'
    assert CliRunner().invoke(app, shlex.split(words)).exit_code == 0
    opened = open_page(browser, problems, 1400)
    opened.goto(path.as_uri())
    left, right = (opened.locator(f"#{side}-tiles").bounding_box() for side in "ab")
    assert left["y"] == right["y"] and left["x"] < right["x"]
    opened.set_viewport_size({"width": 500, "height": 900})
    left, right = (opened.locator(f"#{side}-tiles").bounding_box() for side in "ab")
    assert left["x"] == right["x"] and left["y"] < right["y"]
    opened.close()
    assert problems == []


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs MkDocs: pip install '.[docs]'")
def test_pages_of_the_documentation(browser: Any, tmp_path: Path, problems: list[str]) -> None:
    """No request, no error, none wider than the window; formulas are drawn."""
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    for width in WIDTHS:
        opened = open_page(browser, problems, width)
        for path in sorted(tmp_path.glob("[!4]*.html")):  # 404.html is for a server
            opened.goto(path.as_uri())
            assert opened.evaluate("document.documentElement.scrollWidth") <= width, path.name
        opened.goto((tmp_path / "papers.html").as_uri())
        sizes = opened.evaluate(
            "[...document.querySelectorAll('math')].map(each => each.getBoundingClientRect().width)"
        )
        assert len(sizes) > 20 and min(sizes) > 0
        opened.close()
    assert problems == []
