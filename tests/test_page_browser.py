"""The status page in a real headless Chromium."""

import dataclasses
import json
import shutil

import pytest

import gpuworker
from gpuworker.frontends import page as status_page
from gpuworker.segment import Segment
from gpuworker.segment.execution import Execution
from gpuworker.segment.generation import Generation
from tests import handlers
from tests.conftest import kill_all
from tests.test_cli_text import histogram

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install 'gpuworker[test]'")
CHROMIUM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
pytest_plugins = ("tests.dashboards",)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")

DESKTOP, PHONE = {"width": 1180, "height": 900}, {"width": 360, "height": 740}


@pytest.fixture
def browse():
    """Opens pages. -> the page, and what went wrong or elsewhere in it so far."""
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--headless", "--no-sandbox", "--disable-gpu"])

        def open_page(url, size=DESKTOP, scheme="light", replies=None):
            page = browser.new_context(viewport=size, color_scheme=scheme).new_page()
            page.set_default_timeout(60_000)
            wrong = []
            page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
            page.on("pageerror", lambda error: wrong.append(str(error)))
            page.on("request", lambda request: wrong.append(request.url) if not request.url.startswith(url) and request.url != "data:," else None)
            if replies is not None:
                page.route("**/status.json", lambda route: route.fulfill(json=replies.pop(0) if len(replies) > 1 else replies[0]))
            page.goto(url)
            return page, wrong

        yield open_page
        browser.close()


def until(page, condition):
    """Waits for something that the page does. Not by Page.wait_for_function, whose polling the page's own content security policy forbids."""
    for _ in range(600):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"it did not happen: {condition}; {page.evaluate('document.body.innerText')}")


def wide(page):
    return page.evaluate("document.documentElement.scrollWidth")


def test_figures_move_on_a_desk_and_on_a_phone_by_day_and_by_night(in_process, gate, dashboard, browse):
    worker = in_process(gate, max_batch_size=4)
    client = worker.connect()
    server = dashboard(worker.name)
    pages = [browse(server.url, size, scheme) for size in (DESKTOP, PHONE) for scheme in ("light", "dark")]
    grounds = []
    for page, _ in pages:
        until(page, "document.getElementById('state').textContent === 'serving'")
        grounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert grounds[0] != grounds[1]
    for _ in range(7):
        client.submit(b"x")
    for page, wrong in pages:
        until(page, "document.getElementById('tiles').textContent.includes('7 answered')")
        until(page, "document.querySelector('#charts path.line.k0').getAttribute('d').length > 20")
        until(page, "document.querySelector('#tables').textContent.includes('age')")
        assert page.title() == f"{worker.name}: serving"
        assert wide(page) == page.viewport_size["width"], "nothing to scroll sideways"
        for figure in page.query_selector_all("svg[role=img]"):
            assert figure.get_attribute("aria-label") or not figure.is_visible()
        page.hover("#charts svg")
        until(page, "document.querySelector('#charts .at').getAttribute('visibility') === 'visible'")
        assert wrong == []


def test_a_worker_that_dies_is_replaced_or_goes_and_a_server_that_cannot_be_reached(start, dashboard, browse):
    worker = start(handlers.identity)
    server = dashboard(worker.name)
    page, wrong = browse(server.url)
    until(page, "document.getElementById('state').textContent === 'serving'")
    kill_all(worker)
    until(page, "document.getElementById('state').textContent === 'dead'")
    assert "Its process has died" in page.text_content("#alert")
    assert page.get_attribute("#state", "class") == "pill bad"
    Segment.discard(worker.name)
    until(page, "document.getElementById('state').textContent === 'absent'")
    assert not page.is_visible("#tiles")
    again = start(handlers.identity)
    with gpuworker.connect(again.name) as client:
        client.submit(1)
    until(page, "document.getElementById('tiles').textContent.includes('1 answered')")
    assert page.text_content("#state") == "serving"
    assert wrong == []
    page.route("**/status.json", lambda route: route.abort())
    until(page, "document.getElementById('live').textContent === 'the server cannot be reached'")


def made_up(time_ms, name, more=0, **changes):
    """A worker that has everything, as status.json tells of it."""
    nothing = {"count": 0, "sum_us": 0.0, "buckets": []}
    waits = dict.fromkeys(status_page.STAGES, nothing) | {"run": status_page._histogram(histogram(*[2000.0] * (10 + more), 8000.0))}
    x = dict.fromkeys((field.name for field in dataclasses.fields(Execution)), 0) | {"graph_hits": 9, "graph_misses": 1, "memory_bytes": 3 << 30}
    g = dict.fromkeys((field.name for field in dataclasses.fields(Generation)), 0) | {
        "tokens": 100 + more,
        "blocks_used": 31,
        "blocks_free": 69,
        "waste": 0.03,
    }
    return {
        "time_ms": time_ms, "workers": [{
            "name": name, "state": "serving", "note": "", "handler": "m:f", "owner_pid": 7, "uptime_s": 61.0, "heartbeat_age_s": 0.1, "batch_running_s": 0.0,
            "restarts": 0, "reloads": 0, "slots_in_use": 3, "capacity": 256, "clients": [{"pid": 11 + k, "slots": 3} for k in range(20)],
            "counters": dict.fromkeys(status_page.COUNTERS, 10 + more), "waits": waits,
            "batch_sizes": {str(k): 5 + more for k in range(1, 17)}, "reasons": {"full": 3 + more, "age": 1},
            "options": {"max_batch_size": 16, "max_wait_ms": 5.0, "latency_budget_ms": 25.0},
            "execution": x | {"device_ns": int(1e8 + 1e6 * more), "memory_total_bytes": 80 << 30, "graphs": 12}, "generation": g,
        } | changes],
    }  # fmt: skip


def test_what_workers_say_of_themselves_is_text(in_process, gate, dashboard, browse):
    server = dashboard(in_process(gate).name)
    evil = "<img src=x onerror=hacked=1><script>hacked=1</script>" + "W" * 200
    odd = {"note": evil, "handler": evil, "reasons": {evil: 3}, "batch_sizes": {"1" + evil: 3}, "state": evil}
    reply = made_up(1000.0, evil, **odd)
    reply["workers"] += made_up(1000.0, evil + "2", **odd)["workers"]
    for size in (DESKTOP, PHONE):
        page, wrong = browse(server.url, size, replies=[json.loads(json.dumps(reply))])
        until(page, "document.getElementById('about').textContent.includes('onerror')")
        page.click("nav button:nth-child(2)")
        assert page.text_content("h1") == evil + "2"
        assert page.evaluate("[document.images.length, document.scripts.length, typeof hacked]") == [0, 1, "undefined"]
        assert wide(page) == size["width"]
        assert wrong == []


def test_a_worker_that_has_everything_shows_everything(in_process, gate, dashboard, browse):
    server = dashboard(in_process(gate).name)
    replies = [made_up(1000.0, "everything"), made_up(2000.0, "everything", more=50)]
    page, wrong = browse(server.url, PHONE, replies=replies)
    until(page, "document.getElementById('tiles').textContent.includes('60 answered')")
    shown = page.evaluate("document.body.innerText")
    for part in (
        "50/s", "KV blocks", "3 % of their room is empty", "device memory", "3 GiB", "of 80 GiB", "graph hits", "on time", "within 25 ms", "Sequences",
        "generated 50/s", "busy 5 %", "8\u201315", "50 %", "pid 11", "and 12 more", "run", "2.", "up 61 s",
    ):  # fmt: skip
        assert part in shown, part
    assert wide(page) == PHONE["width"]
    assert wrong == []


def test_the_browser_counts_as_the_library_does(in_process, gate, dashboard, browse):
    page, _ = browse(dashboard(in_process(gate).name).url)
    for spans in ([45.0], [0.3] * 3 + [2.0], [2000.0] * 50 + [9000.0] * 3, [5e6, 1e9]):
        h = histogram(*spans)
        for q in (0.5, 0.9, 0.99):
            found = page.evaluate("([buckets, q]) => quantileUs(buckets, q)", [status_page._histogram(h)["buckets"], q])
            assert found == pytest.approx(h.quantile_us(q), abs=1e-3)
    assert page.evaluate("quantileUs([], 0.5)") is None
    before, now = (made_up(t, "w", more) for t, more in ((1000.0, 50), (2000.0, 0)))
    pair = [before["workers"][0] | {"time_ms": 1000.0}, now["workers"][0] | {"time_ms": 2000.0}]
    fell = page.evaluate("([before, now]) => pointOf(before, now)", pair)
    assert not [value for value in fell.values() if value is not None and value < 0], "counters of another segment are no negative rates"
    assert fell["completed"] is None
