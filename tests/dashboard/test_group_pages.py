"""Groups and trajectories in a real browser: what a run holds stays text, and the strips have all of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from run_with_groups import MARKUP, ShownRun, turn

from penstock.observe import jsonl
from penstock.samples import ROOT
from penstock.types import EpisodeState

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.long, pytest.mark.integration]

AXE = Path(__file__).parent / "vendor" / "axe.min.js"
RENDERER = "export const render = (episode, { h }) => h('p', { id: 'mine' }, episode.messages[0].content);\n"
GREEDY = "export const render = (episode, { h }) => { const p = h('p'); p.innerHTML = episode.messages[0].content; };\n"
WITHIN_MS = 60_000
PAGES = (
    "groups",
    "groups?sort=spread",
    "groups/5",
    "groups/5?view=difference&left=0&right=1",
    "groups/6/0",
    "groups/6/0?view=tokens&colour=version",
    "groups/6/0?view=tokens&colour=trained",
    "groups/6/0?view=raw",
    "groups/7",
)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A dashboard with a run full of markup."""
    home = tmp_path_factory.mktemp("shown")
    with ShownRun(home / "runs" / "mine") as run:
        run.play(5)
        run.end(5, EpisodeState.FILTERED)
        run.decide("filter", MARKUP, group=5, dropped_by="zero_variance")
        first = turn(MARKUP, MARKUP, "and on", first=True, versions=(3, 4), reward=-0.5)
        branch, alone = turn(MARKUP, "b", parent=0), turn("hello", "c", first=True, parent=ROOT)
        run.play(6, turns=[first, turn(MARKUP, MARKUP, role="tool"), branch, alone], task_id=MARKUP, error=MARKUP)
        run.admit(7)
        run.decide("retry", MARKUP, group=7, attempt=0)
        run.end(7, EpisodeState.FAILED)
        run.play(8)
        for number in range(1003):
            run.decide("dispatch", f"turn {number}", group=8)
    jsonl.write_json(run.run_dir / "state.json", {"run_id": "mine", "status": "completed"})
    (home / "renderers").mkdir()
    (home / "renderers" / "Game.js").write_text(RENDERER)
    command = [sys.executable, "-m", "penstock.cli.main", "dashboard", "--runs-dir", str(home / "runs"), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=home, env=dict(os.environ)) as server:
        assert server.stdout is not None
        try:
            line = server.stdout.readline()
            assert "http://" in line, line
            yield line[line.index("http://") :].partition("?")[0]
        finally:
            server.terminate()
            server.wait(timeout=30)


@pytest.fixture(scope="module")
def context(browser: Browser) -> Iterator[Any]:
    found = browser.new_context(viewport={"width": 1024, "height": 900})
    found.set_default_timeout(WITHIN_MS)
    yield found
    found.close()


@pytest.fixture
def page(context: Any) -> Iterator[Page]:
    """A page in which no error may come, and no dialog of markup that acted."""
    page: Page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda told: problems.append(told.text) if told.type == "error" else None)
    page.on("dialog", lambda dialog: (problems.append(f"dialog {dialog.message}"), dialog.dismiss()))
    yield page
    page.close()
    assert not problems


def shown(page: Page, url: str, place: str, wanted: str) -> None:
    """Go to a page of the run and wait until it shows an element."""
    page.goto("about:blank")
    page.goto(f"{url}#/mine/{place}")
    page.wait_for_selector(wanted)


@pytest.mark.parametrize("place", PAGES)
def test_markup_of_a_run_stays_text(page: Page, url: str, place: str) -> None:
    shown(page, url, place, "main table, main .message, main .token, main pre")
    assert page.locator("main img, main script").count() == 0
    if "6/0" in place or "7" in place:
        assert MARKUP in page.inner_text("main")
    page.set_viewport_size({"width": 360, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, "wider than a telephone"
    page.evaluate(AXE.read_text())
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    serious = [each["help"] for each in found["violations"] if each["impact"] in ("serious", "critical")]
    page.set_viewport_size({"width": 1024, "height": 900})
    assert not serious


def test_strips_have_all_of_the_text(page: Page, url: str) -> None:
    shown(page, url, "groups/6/0?view=tokens&branch=1", ".token")
    texts = page.evaluate("[...document.querySelectorAll('.strip')].map((strip) => strip.textContent)")
    answer = page.request.get(f"{url}api/runs/mine/groups/6/episodes/0").json()
    assert texts == ["".join([*strip["observed"], *strip["texts"]]) for strip in answer["tokens"][:2]]
    assert page.locator(".swap").count() == 2 and page.locator(".cut").count() == 1
    page.locator(".strip").first.focus()
    page.keyboard.press("End")
    assert "<|end|>" in page.inner_text(".token-facts") and "version 4" in page.inner_text(".token-facts")
    page.get_by_role("button", name="Segment").click()
    assert "colour=segment" in page.url, "the address can be shared"


def test_earlier_decisions_come_when_they_are_asked_for(page: Page, url: str) -> None:
    shown(page, url, "groups/8", "main .message")
    rows = page.locator("section[aria-label='Decisions about this group'] tbody tr")
    assert rows.count() == 1000 and "turn 3" in rows.first.inner_text()
    page.get_by_role("button", name="Show earlier decisions").click()
    rows.nth(1002).wait_for()
    assert rows.count() == 1003 and "turn 0" in rows.first.inner_text()
    assert not page.is_visible(":text('Earlier ones may be missing')")


def test_a_renderer_of_the_user(page: Page, url: str) -> None:
    shown(page, url, "groups/6/0?view=rendered", "#mine")
    assert page.inner_text("#mine") == "hello"


def test_the_browser_refuses_markup_from_a_renderer(
    context: Any, url: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = next(tmp_path_factory.getbasetemp().glob("shown*/renderers/Game.js"))
    path.write_text(GREEDY)
    page = context.new_page()
    try:
        shown(page, url, "groups/6/0?view=rendered", ".rendered .note.bad")
        assert "TrustedHTML" in page.inner_text(".rendered .note.bad")
        assert page.locator("main img").count() == 0
    finally:
        page.close()
        path.write_text(RENDERER)


def test_search_and_order(page: Page, url: str) -> None:
    shown(page, url, "groups", "main table")
    page.get_by_role("searchbox").fill("onerror")
    page.wait_for_url("**text=onerror**")
    page.get_by_role("button", name="failed 1").click()
    page.wait_for_url("**status=failed**")
    rows = page.locator("tbody tr")
    rows.nth(1).wait_for(state="detached")
    assert rows.count() == 1 and MARKUP in rows.inner_text()
