"""The pages of the dashboard in a real browser: every page of six runs at three widths in both themes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from free_port import free_port
from made_dashboard_runs import ROOT, WrittenRun, shown_runs

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page, Route

pytestmark = [pytest.mark.long, pytest.mark.integration]

AXE = Path(__file__).parent / "vendor" / "axe.min.js"
RUNS = ("finished", "live", "crashed", "empty", "tools", "finished-simulated")
PAGES = ("overview", "timeline", "decisions", "groups", "processes", "settings")
OTHERS = (
    "#/",
    "#/compare/",
    "#/compare/finished,tools",
    "#/compare/finished,finished-simulated",
    "#/tools/groups/40",
    "#/tools/groups/40/1",
)
ADDRESSES = (*OTHERS, *(f"#/{run}/{page}" for run in RUNS for page in PAGES))
WIDTHS = (360, 1024, 2560)
THEMES = ("light", "dark")
WITHIN_MS = 60_000
REFUSED = "Failed to load resource"
"""Beginning of what the browser notes when an answer is no success. The pages show it."""
SHOWN = "main[aria-busy=false]"


@contextmanager
def dashboard(runs_dir: Path, port: int) -> Iterator[str]:
    """Serve a directory of runs during the body, and yield the address."""
    command = [sys.executable, "-m", "penstock.cli.main", "dashboard", "--runs-dir", str(runs_dir), "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=dict(os.environ)) as server:
        assert server.stdout is not None
        try:
            line = server.stdout.readline()
            assert "http://" in line, line
            yield f"http://127.0.0.1:{port}/"
        finally:
            server.terminate()
            server.wait(timeout=30)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WrittenRun]:
    with shown_runs(tmp_path_factory.mktemp("shown")) as run:
        yield run


@pytest.fixture(scope="module")
def url(live: WrittenRun, browser: Browser) -> Iterator[str]:
    with dashboard(live.run_dir.parent, free_port()) as url:
        yield url


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Return a function that opens a page; each error in it, and each markup that acted, fails the test."""
    opened = []
    problems: list[str] = []

    def told(message: ConsoleMessage) -> None:
        if message.type == "error" and not message.text.startswith(REFUSED):
            problems.append(message.text)

    def opener(address: str, *, width: int = 1024, theme: Any = "light", bypass_csp: bool = False) -> Page:
        size: Any = {"width": width, "height": 900}
        context = browser.new_context(viewport=size, color_scheme=theme, bypass_csp=bypass_csp)
        context.set_default_timeout(WITHIN_MS)
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(f"{page.url}: {error}"))
        page.on("console", told)
        opened.append(page)
        page.goto(address)
        page.wait_for_selector(SHOWN)
        return page

    yield opener
    for page in opened:
        assert page.evaluate("window.acted") is None
        page.context.close()
    assert not problems


def turn_to(page: Page, url: str, hash_: str) -> None:
    page.goto(url + hash_)
    until(page, "hash => location.hash === hash", hash_)
    page.wait_for_selector(SHOWN)


def until(page: Page, condition: str, *given: Any) -> None:
    """Wait until a condition holds. `Page.wait_for_function` compiles text, which the content policy forbids."""
    limit = time.monotonic() + WITHIN_MS / 1000
    while not page.evaluate(condition, *given):
        assert time.monotonic() < limit, f"{condition} does not come true"
        page.wait_for_timeout(50)


def overflow(page: Page) -> int:
    """Return by how many pixels the page is wider than the screen."""
    width: int = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    return width


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_page_fits_and_has_no_serious_finding(
    open_page: Callable[..., Page], url: str, width: int, theme: str
) -> None:
    page = open_page(url, width=width, theme=theme, bypass_csp=True)
    page.add_script_tag(path=str(AXE))
    found = []
    for address in ADDRESSES:
        turn_to(page, url, address)
        text = page.inner_text("main")
        assert "This page has an error" not in text, f"{address}: {text}"
        assert len(text) > 40, f"{address}: {text}"
        if (wider := overflow(page)) > 0:
            found.append(f"{address} is {wider} pixels too wide")
        result = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        for violation in result["violations"]:
            if violation["impact"] in ("serious", "critical"):
                found.append(f"{address}: {violation['help']}: {violation['nodes'][0]['html'][:200]}")
    assert not found, "\n".join(found)


def test_the_overview_answers_the_questions(open_page: Callable[..., Page], url: str) -> None:
    text = open_page(f"{url}#/finished/overview").inner_text("main")
    assert "Yes: the held-out reward rose from 0.3 to 0.9." in text
    assert "The trainer waits for the servers" in text
    assert "67 % of the ended episodes were trained." in text
    assert "Last change: scheduler.max_staleness 1 → 2, N_min 16 → 32." in text
    assert "Yes: all numbers are within their usual limits." in text
    assert "equals admitted: nothing was lost" in text
    assert "The run finds N_min itself, from the learner's timings." in text
    assert "Ledger at step 40" in text and "was being played" in text and "is being played" not in text


def test_a_page_is_shown_when_its_newest_numbers_are_there(open_page: Callable[..., Page], url: str) -> None:
    """When the stream tells of the end of the run, a second request begins beside the first."""
    page = open_page(url)
    streams: list[Route] = []
    requests: list[Route] = []
    page.route("**/live", lambda route: streams.append(route))
    page.route("**/series?*", lambda route: requests.append(route))

    def await_requests(number: int) -> None:
        limit = time.monotonic() + WITHIN_MS / 1000
        while len(requests) < number or not streams:
            assert time.monotonic() < limit, (requests, streams)
            page.wait_for_timeout(20)

    page.goto(f"{url}#/finished/overview")
    await_requests(1)
    first = len(requests)
    streams[0].continue_()
    await_requests(first + 1)
    with page.expect_response("**/series?*"):
        for each in requests[:first]:
            each.continue_()
    for _ in range(3):
        page.evaluate("new Promise(requestAnimationFrame)")
    assert page.locator(SHOWN).count() == 0
    page.unroute("**/series?*")
    for each in requests[first:]:
        each.continue_()
    page.wait_for_selector(SHOWN)
    assert "Yes: all numbers are within their usual limits." in page.inner_text("main")


def test_alarms_of_long_ago_are_folded(open_page: Callable[..., Page], url: str) -> None:
    page = open_page(f"{url}#/finished/overview")
    assert "answers are cut" not in page.inner_text("main")
    page.get_by_text("1 alarm before the last tenth of the run").click()
    assert "answers are cut step 20" in " ".join(page.inner_text("main details .note").split())


def test_a_crashed_run_says_why_and_what_to_type(open_page: Callable[..., Page], url: str) -> None:
    page = open_page(f"{url}#/crashed/overview")
    alert = page.inner_text("main [role=alert]")
    assert "trainer-0 died: killed by SIGKILL <img src=x" in alert
    assert "20 of the latest 100 groups failed" in page.inner_text("main")
    assert "penstock resume" in page.inner_text("main") or "penstock logs" in page.inner_text("main")
    page.get_by_role("link", name="log of trainer-0").click()
    until(page, "document.querySelector('pre.log')?.textContent.includes('trainer-0: line 39')")


def test_texts_of_a_run_are_never_markup(open_page: Callable[..., Page], url: str) -> None:
    page = open_page(url)
    for address in ADDRESSES:
        turn_to(page, url, address)
        assert page.locator("main img, main script, main b:has-text('none')").count() == 0, address


def test_an_empty_run_says_what_is_missing(open_page: Callable[..., Page], url: str) -> None:
    page = open_page(f"{url}#/empty/overview")
    assert "No step yet" in page.inner_text("main")
    turn_to(page, url, "#/empty/timeline")
    assert "No activity recorded yet" in page.inner_text("main")
    turn_to(page, url, "#/empty/decisions")
    assert "No decision yet" in page.inner_text("main")


def test_no_run_at_all_says_how_to_start_one(open_page: Callable[..., Page], tmp_path: Path) -> None:
    with dashboard(tmp_path, free_port()) as url:
        page = open_page(url)
        assert "penstock train examples/quickstart/run.yaml" in page.inner_text("main")


def test_the_keyboard_reaches_everything(open_page: Callable[..., Page], url: str) -> None:
    page = open_page(url)
    reach(page, "link", "finished")
    page.keyboard.press("Enter")
    page.wait_for_selector("main h2:has-text('Is it learning?')")
    page.wait_for_selector(SHOWN)
    assert page.evaluate("document.activeElement.id") == "main"
    reach(page, "button", "training, smoothed.*")
    page.keyboard.press("Space")
    assert page.get_by_role("button", name=re.compile("training, smoothed")).get_attribute("aria-pressed") == "false"
    reach(page, "button", "Table of Reward")
    page.keyboard.press("Enter")
    assert page.get_by_role("region", name="Table of Reward").first.locator("tbody tr").count() > 10
    page.keyboard.press("Home")
    reach(page, "link", "Timeline")
    page.keyboard.press("Enter")
    page.wait_for_selector("canvas.lanes")
    page.wait_for_selector(SHOWN)
    reach(page, "application", "Activity of .*")
    before = page.get_attribute("canvas.lanes", "aria-label")
    page.keyboard.press("+")
    until(page, "before => document.querySelector('canvas.lanes').ariaLabel !== before", before)
    page.keyboard.press("n")
    page.wait_for_selector("main dt:has-text('policy version')")
    reach(page, "button", "Theme: .*")
    page.keyboard.press("Enter")
    assert page.evaluate("localStorage.getItem('penstock.theme')") == "light"


def reach(page: Page, role: str, name: str, most: int = 400) -> None:
    """Press Tab until an element with this role and a name that matches `name` has the focus. Fails if the focus is not
    visible."""
    described = """() => {
        const element = document.activeElement;
        const roles = {A: 'link', BUTTON: 'button', INPUT: 'textbox', SELECT: 'combobox'};
        return [element.getAttribute('role') ?? roles[element.tagName] ?? '',
                element.ariaLabel ?? element.textContent.trim(), getComputedStyle(element).outlineStyle];
    }"""
    for _ in range(most):
        page.keyboard.press("Tab")
        found_role, found_name, outline = page.evaluate(described)
        if found_role == role and re.fullmatch(name, found_name):
            assert outline != "none", f"the focus of {name} is not visible"
            return
    pytest.fail(f"Tab does not reach the {role} {name}")


def test_a_live_run_goes_on_and_keeps_the_focus(open_page: Callable[..., Page], url: str, live: WrittenRun) -> None:
    page = open_page(f"{url}#/live/overview")
    page.wait_for_selector(f"header :text('step {live.step} of')")
    page.get_by_role("button", name="Table of Reward", exact=True).click()
    page.get_by_role("button", name=re.compile("Copy penstock stop")).focus()
    live.take_step(time.time())
    page.wait_for_selector(f"header :text('step {live.step} of')")
    assert page.evaluate("document.activeElement.ariaLabel").startswith("Copy penstock stop")
    until(page, "step => document.querySelector('.chart tbody th').textContent === String(step)", live.step)
    live.note("alarm", reason="the reward has stood still for 100 steps")
    page.wait_for_selector(".note:has-text('the reward has stood still')")


def test_many_tabs_of_an_ended_run_leave_room_for_more(open_page: Callable[..., Page], url: str) -> None:
    first = open_page(f"{url}#/finished/overview")
    first.wait_for_selector(".line[data-state=ended]")
    for _ in range(7):  # a browser has six connections for all tabs of one server
        page = first.context.new_page()
        page.goto(f"{url}#/finished/overview")
        page.wait_for_selector(".line[data-state=ended]")
        page.wait_for_selector(SHOWN)


def test_the_tabs_of_a_browser_share_the_stream_of_a_live_run(
    open_page: Callable[..., Page], url: str, live: WrittenRun
) -> None:
    first = open_page(f"{url}#/live/overview")
    first.wait_for_selector(".line[data-state=live]")
    streams: list[str] = []
    first.context.on("request", lambda request: streams.append(request.url) if is_stream(request.url) else None)
    others = [first.context.new_page() for _ in range(7)]  # a browser has six connections for all tabs of one server
    for page in others:
        page.goto(f"{url}#/live/overview")
        page.wait_for_selector(".line[data-state=live]")
        page.wait_for_selector(SHOWN)
    live.take_step(time.time())
    for page in (first, *others):
        page.wait_for_selector(f"header :text('step {live.step} of')")
    assert not streams, "only the first page has a stream"
    with first.context.expect_event("request", lambda request: is_stream(request.url)):
        first.goto("about:blank")  # another page takes over
    live.take_step(time.time())
    for page in others:
        page.wait_for_selector(f"header :text('step {live.step} of')")
    assert len(streams) == 1


def is_stream(url: str) -> bool:
    return url.endswith("/runs/live/live")


def test_a_hidden_page_holds_no_stream(open_page: Callable[..., Page], url: str, live: WrittenRun) -> None:
    page = open_page(f"{url}#/live/overview")
    page.wait_for_selector(".line[data-state=live]")
    turn_visibility = """hidden => {
        Object.defineProperty(document, 'hidden', {value: hidden, configurable: true});
        document.dispatchEvent(new Event('visibilitychange'));
    }"""
    with page.expect_event("requestfailed", lambda request: is_stream(request.url)):
        page.evaluate(turn_visibility, True)
    live.take_step(time.time())
    page.evaluate(turn_visibility, False)
    page.wait_for_selector(f"header :text('step {live.step} of')")


def test_a_live_run_is_followed_on_the_timeline(open_page: Callable[..., Page], url: str, live: WrittenRun) -> None:
    page = open_page(f"{url}#/live/timeline")
    page.wait_for_selector("button[aria-pressed=true]:has-text('Follow')")
    before = page.get_attribute("canvas.lanes", "aria-label")
    live.take_step(time.time())
    until(page, "before => document.querySelector('canvas.lanes').ariaLabel !== before", before)


def test_stopping_needs_a_confirmation_and_the_key(open_page: Callable[..., Page], url: str) -> None:
    page = open_page(f"{url}#/live/overview")
    page.get_by_role("button", name="Stop the run…").click()
    page.get_by_role("button", name="Stop the run", exact=True).click()
    page.wait_for_selector("dialog :text('penstock stop live')")
    page.keyboard.press("Escape")
    assert not page.is_visible("dialog")


def test_the_page_survives_a_restart_of_the_server(
    open_page: Callable[..., Page], live: WrittenRun, tmp_path: Path
) -> None:
    port = free_port()
    with dashboard(live.run_dir.parent, port) as url:
        page = open_page(f"{url}#/live/overview")
        page.wait_for_selector(".line[data-state=live]")
    page.wait_for_selector(".line[data-state=reconnecting]")
    with dashboard(live.run_dir.parent, port):
        page.wait_for_selector(".line[data-state=live]")
        live.take_step(time.time())
        page.wait_for_selector(f"header :text('step {live.step} of')")
        until(page, "!document.querySelector('#notes .bad')")
        page.goto("about:blank")


def test_a_missing_run_leads_back(open_page: Callable[..., Page], url: str) -> None:
    page = open_page(f"{url}#/missing/overview")
    assert "there is no run missing" in page.inner_text("main")
    page.get_by_role("link", name="All runs", exact=True).click()
    page.wait_for_selector("main :text('finished')")


def test_charts_zoom_together(open_page: Callable[..., Page], url: str) -> None:
    page = open_page(f"{url}#/finished/overview")
    plot = page.locator(".chart .u-over").first
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 60, steps=5)
    page.mouse.up()
    page.get_by_role("button", name="Show all").click()
    page.wait_for_selector("button:has-text('Show all')", state="hidden")


def test_a_chart_is_saved_as_a_picture(open_page: Callable[..., Page], url: str) -> None:
    page = open_page(f"{url}#/finished/overview")
    with page.expect_download() as saved:
        page.get_by_role("button", name="PNG of Reward", exact=True).click()
    assert saved.value.suggested_filename == "reward.png"
    assert saved.value.path().read_bytes().startswith(b"\x89PNG")


def test_a_dropped_group_leads_to_its_reason(open_page: Callable[..., Page], url: str) -> None:
    page = open_page(f"{url}#/finished/decisions?decider=filter&text=all+rewards")
    rows = page.locator("section[aria-label='All decisions'] tbody tr")
    rows.first.wait_for()
    assert all("all rewards are 1" in text for text in rows.all_inner_texts())
    number = rows.first.locator("a").inner_text()
    rows.first.locator("a").click()
    until(page, "hash => location.hash === hash", f"#/finished/groups/{number}")
    page.wait_for_selector(SHOWN)


def test_held_out_groups_have_no_link(open_page: Callable[..., Page], url: str) -> None:
    page = open_page(f"{url}#/finished/decisions?group=10040")
    rows = page.locator("section[aria-label='All decisions'] tbody tr")
    rows.nth(1).wait_for()
    assert ["10040 (held out)" in text for text in rows.all_inner_texts()] == [True, True]
    assert page.locator("main a:has-text('10040')").count() == 0
    turn_to(page, url, "#/finished/groups/10040")
    assert "no record of group 10040: groups of held-out tasks leave none" in page.inner_text("main")


def test_changes_of_settings_are_shown(open_page: Callable[..., Page], url: str) -> None:
    page = open_page(f"{url}#/finished/decisions")
    change = page.locator("section[aria-label='Changes of settings'] tbody tr")
    assert "scheduler.max_staleness\n1\n→\n2" in change.inner_text()
    turn_to(page, url, "#/finished/settings")
    page.get_by_role("searchbox").fill("max_staleness")
    assert "in force: 2" in page.inner_text("main")


def test_settings_that_differ_come_first(open_page: Callable[..., Page], url: str) -> None:
    page = open_page(f"{url}#/finished/settings")
    first = page.locator("main section").first
    assert first.get_attribute("aria-label") == "Differs from the defaults"
    assert "trainer.steps" in first.inner_text()
    assert "trainer.seed" not in first.inner_text()


def test_runs_are_chosen_and_compared(open_page: Callable[..., Page], url: str) -> None:
    page = open_page(url)
    page.get_by_role("checkbox", name="Compare finished", exact=True).check()
    page.get_by_role("checkbox", name="Compare tools").check()
    page.get_by_role("button", name="Compare 2 runs").click()
    page.wait_for_selector("main h2:has-text('Settings that differ')")
    assert "shop.py:Shop" in page.inner_text("section[aria-label='Settings that differ']")
    assert page.locator("main .chart:visible").count() > 5


def test_a_simulated_run_is_marked_and_says_what_it_cannot_have(open_page: Callable[..., Page], url: str) -> None:
    page = open_page(url)
    row = page.locator("main tbody tr").filter(has=page.get_by_role("link", name="finished-simulated", exact=True))
    assert "simulated" in row.locator("td.pill, .pill").all_inner_texts()
    turn_to(page, url, "#/finished-simulated/overview")
    page.wait_for_selector("header .pill:has-text('simulated')")
    text = page.inner_text("main")
    assert "Its models were fitted to finished." in text and "no texts, logs or checkpoints" in text
    assert "X* is the most that the modelled machines allow" in text and "Is it learning?" not in text
    turn_to(page, url, "#/finished-simulated/groups")
    assert "A simulated run has no groups to read" in page.inner_text("main")
    turn_to(page, url, "#/finished-simulated/processes")
    assert "A simulated run has no processes" in page.inner_text("main")
    turn_to(page, url, "#/finished-simulated/timeline")
    assert "rollout-0" in page.get_attribute("canvas.lanes", "aria-label")


def test_a_simulated_run_is_compared_with_the_run_it_was_fitted_to(open_page: Callable[..., Page], url: str) -> None:
    page = open_page(f"{url}#/compare/finished,finished-simulated")
    panel = page.locator("section[aria-label='Prediction and reality']")
    assert "By penstock plan (asynchronous, 1 + 1" in panel.inner_text()
    assert "Against the simulated run finished-simulated, which was fitted to it." in panel.inner_text()
    first = panel.locator("tbody tr").first.inner_text().split("\t")
    assert first == ["step time", "800 ms", "1 s", "1.25, more"]
    assert page.locator("section[aria-label='Where the time went'] .bars").count() >= 4
    assert page.locator("main .chart:visible").count() > 5
    turn_to(page, url, "#/compare/crashed,tools")
    assert "These runs keep no prediction" in panel.inner_text()


def test_the_overview_has_the_plan_and_the_bound(open_page: Callable[..., Page], url: str) -> None:
    page = open_page(f"{url}#/finished/overview")
    panel = page.locator("section[aria-label='Prediction and reality']")
    assert "trained answers/s\t40\t32\t0.8, less" in panel.inner_text()
    assert "3 GiB" in panel.inner_text() and "is not recorded" in panel.inner_text()
    throughput = page.locator(".chart").filter(has=page.get_by_role("heading", name="Throughput"))
    assert (
        "X* estimates the most that the same trainer and servers could do, if the busier side never waited."
        in throughput.inner_text()
    )
    assert "reach 80 % of it" in throughput.inner_text() and "X* for trained, estimated" in throughput.inner_text()
    turn_to(page, url, "#/tools/overview")
    assert not panel.is_visible()


def test_the_staleness_of_the_latest_steps_is_a_histogram(open_page: Callable[..., Page], url: str) -> None:
    page = open_page(f"{url}#/finished/overview")
    canvas = page.locator("canvas.histogram")
    assert canvas.get_attribute("aria-label") == (
        "Staleness of the latest steps. 0: 53 %, 1: 43 %, 2: 1.3 %, masked, over 2: 2 %"
    )
    button = page.get_by_role("button", name="Table of Staleness of the latest steps")
    button.focus()
    page.keyboard.press("Enter")
    rows = page.get_by_role("region", name="Table of Staleness of the latest steps").locator("tbody tr")
    assert rows.first.inner_text().split("\t") == ["0", "53 %", "6,400"] and rows.count() == 4
    assert "Steps 21 to 40. No answer was discarded as too old." in page.inner_text("main")


def test_every_panel_is_saved_as_a_picture(open_page: Callable[..., Page], url: str) -> None:
    page = open_page(f"{url}#/finished/overview")
    assert saved_picture(page, "PNG of Staleness of the latest steps") == "staleness-of-the-latest-steps.png"
    turn_to(page, url, "#/finished/timeline")
    assert saved_picture(page, "PNG of the timeline") == "timeline-of-finished.png"
    turn_to(page, url, "#/tokens/groups/7/0?view=tokens")
    assert saved_picture(page, "PNG of the tokens") == "group-7-episode-0-of-tokens.png"


def saved_picture(page: Page, name: str) -> str:
    """Press a button that saves a picture, and return the name of the file."""
    with page.expect_download() as saved:
        page.get_by_role("button", name=name, exact=True).click()
    assert saved.value.path().read_bytes().startswith(b"\x89PNG")
    return str(saved.value.suggested_filename)
