"""The status page: how it is served, and what a person sees of it in a browser."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.support.ui import WebDriverWait

from proxy.web.page import build, page, status_page
from tests.web import scenes
from tests.web.browser import ScriptedProxy, chromium

HOSTILE = '<img src=x onerror="document.title=1;window.owned=1"></td><script>window.owned=1</script>'


async def get(
    headers: list[tuple[bytes, bytes]] | None = None, method: str = "GET"
) -> tuple[int, dict[str, str], bytes]:
    sent: list[Any] = []

    async def receive() -> Any:
        raise AssertionError("the page needs no body")

    async def send(message: Any) -> None:
        sent.append(message)

    await status_page({"type": "http", "method": method, "path": "/", "headers": headers or []}, receive, send)
    start, body = sent
    return start["status"], {n.decode(): v.decode() for n, v in start["headers"]}, body["body"]


async def test_the_page_is_one_file_that_may_load_nothing_else() -> None:
    status, headers, body = await get()
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert int(headers["content-length"]) == len(body)
    text = body.decode()
    assert not re.search(r"(?:src|href)=(?!\"data:)", text)
    assert not re.search(r"@import|url\(|innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b| on[a-z]+=", text)
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]
    for tag in ("script", "style"):
        (source,) = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in headers["content-security-policy"]


async def test_head_and_unchanged_page_have_no_body() -> None:
    _, headers, body = await get()
    assert await get(method="HEAD") == (200, headers, b"")
    for given in (headers["etag"], f'"other", W/{headers["etag"]}', "*"):
        status, again, nothing = await get([(b"if-none-match", given.encode())])
        assert (status, nothing, again["etag"]) == (304, b"", headers["etag"])
    assert (await get([(b"if-none-match", b'"other"')]))[2] == body


def test_another_page_has_another_tag() -> None:
    assert build(b"<p>a</p>").etag != build(b"<p>b</p>").etag
    assert b"script-src 'none'" in dict(build(b"<p>a</p>").headers)[b"content-security-policy"]
    assert page() is page()


# -- in a browser ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebDriver]:
    with chromium(str(tmp_path_factory.mktemp("profile"))) as driver:
        yield driver


@pytest.fixture
def browser(shared_browser: WebDriver) -> Iterator[WebDriver]:
    shared_browser.set_window_size(1280, 900)
    yield shared_browser
    shared_browser.get("about:blank")
    shared_browser.get_log("browser")  # type: ignore[no-untyped-call]


@pytest.fixture
def scripted() -> Iterator[ScriptedProxy]:
    proxy = ScriptedProxy()
    yield proxy
    proxy.stop()


def until(browser: WebDriver, what: Callable[[], Any]) -> None:
    WebDriverWait(browser, 30, poll_frequency=0.05).until(lambda _: what())


def text(browser: WebDriver, selector: str = "body") -> str:
    return browser.find_element(By.CSS_SELECTOR, selector).text


def rows(browser: WebDriver, table: str) -> list[str]:
    script = "return [...document.querySelectorAll(arguments[0] + ' tbody')].map(b => b.innerText)"
    return [re.sub(r"\s+", " ", row).strip() for row in browser.execute_script(script, table)]  # type: ignore[no-untyped-call]


def show(browser: WebDriver, proxy: ScriptedProxy, fleet: Any) -> None:
    proxy.fleet = fleet
    browser.get(proxy.url)
    until(browser, lambda: text(browser, "#link") == "live")


def errors(browser: WebDriver) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser")]  # type: ignore[no-untyped-call]


browser_test = pytest.mark.browser


@browser_test
def test_a_person_sees_states_versions_errors_and_changes(browser: WebDriver, scripted: ScriptedProxy) -> None:
    show(browser, scripted, scenes.busy(3, 4))
    assert text(browser, "h1") == "2 of 3 ready"
    assert text(browser, "#sentence") == "Serving without #2 (down)."
    replicas = rows(browser, "#t-replicas")
    assert [re.findall(r"ready|down", row)[0] for row in replicas] == ["ready", "ready", "down"]
    assert "10.0.0.1:8000" in replicas[1] and "trl-policy-v43 and 3 more" in replicas[1]
    assert replicas[2].endswith("connection refused (probe)")
    versions = rows(browser, "#t-versions")
    assert len(versions) == 5
    assert versions[0].startswith("trl-policy-v44 – loading 0") and versions[4].startswith("trl-policy-v40")
    assert re.fullmatch(r"trl-policy-v43 [0-9a-f]{8} committed 61 2 of 3", versions[1])
    changes = rows(browser, "#t-transactions")
    assert len(changes) == 13
    assert "running" in changes[0] and "canary 0.80 s" in changes[0]
    assert changes[4].startswith("pause undone") and changes[4].endswith("rank 16 > max 8)")
    assert "affinity" in text(browser, "#routes") and "%" in text(browser, "#pct-actual")
    label = browser.find_element(By.ID, "chart").get_dom_attribute("aria-label")
    assert label is not None and label.startswith("Requests a second over the last 10 minutes: affinity 1")
    assert errors(browser) == []


@browser_test
def test_it_follows_the_fleet_without_a_reload(browser: WebDriver, scripted: ScriptedProxy) -> None:
    first = scenes.fleet(replicas=[scenes.replica(0), scenes.replica(1)], history=[scenes.second(7)])
    show(browser, scripted, first)
    assert text(browser, "h1") == "2 of 2 ready"
    assert text(browser, "#no-versions") == "No adapter is loaded."
    browser.execute_script("document.querySelector('#t-replicas tbody').dataset.kept = 'yes'")  # type: ignore[no-untyped-call]
    scripted.fleet = scenes.fleet(
        replicas=[scenes.replica(0, in_flight=5, adapters=["p-v1"]), scenes.replica(1, state="joining")],
        adapters=[scenes.adapter("p-v1", 1, [0], in_flight=5)],
        paused=True,
        pause={"mode": "keep", "lazy": False, "age_secs": 10.0, "lease_secs": 600},
        history=[scenes.second(8, affinity=5, ready=1)],
    )
    until(browser, lambda: text(browser, "h1") == "1 of 2 ready")
    assert "Paused (keep) for 10 s; ends by itself in 9 min 50 s." in text(browser, "#pause")
    assert "p-v1" in rows(browser, "#t-versions")[0]
    assert browser.find_element(By.CSS_SELECTOR, "#t-replicas tbody").get_dom_attribute("data-kept") == "yes"
    assert browser.title == "paused · 1/2 · lorafleet"
    assert scripted.asked[0] == "/fleet" and scripted.asked[-1] in ("/fleet?after=6", "/fleet?after=7")
    assert errors(browser) == []


@browser_test
def test_text_from_clients_and_replicas_is_only_text(browser: WebDriver, scripted: ScriptedProxy) -> None:
    fleet = scenes.fleet(
        replicas=[
            scenes.replica(0, adapters=[HOSTILE], last_error=HOSTILE, tainted={HOSTILE: HOSTILE}, others=[HOSTILE]),
            scenes.replica(1, state=HOSTILE, url=HOSTILE, version=HOSTILE),
        ],
        adapters=[scenes.adapter(HOSTILE, 1, [0], path=HOSTILE, upstream=HOSTILE + "@1", digest=HOSTILE)],
        transactions=[scenes.transaction(1, HOSTILE, HOSTILE, 0, error=HOSTILE, outcome=HOSTILE)],
        history=[scenes.second(1, marks=[{"kind": HOSTILE, "outcome": HOSTILE, "name": HOSTILE}])],
        policy=HOSTILE,
    )
    fleet["transactions"][0]["phases"][0]["name"] = HOSTILE
    show(browser, scripted, fleet)
    for table in ("#t-replicas", "#t-versions", "#t-transactions"):
        assert HOSTILE in rows(browser, table)[0]
    assert browser.execute_script("return document.images.length + document.scripts.length") == 1  # type: ignore[no-untyped-call]
    assert browser.execute_script("return window.owned") is None  # type: ignore[no-untyped-call]
    assert errors(browser) == []


@browser_test
def test_it_says_when_the_proxy_cannot_be_reached(browser: WebDriver, scripted: ScriptedProxy) -> None:
    show(browser, scripted, scenes.busy(3, 1))
    scripted.fleet = 500
    until(browser, lambda: "status 500" in text(browser, "#lost"))
    scripted.fleet = scenes.busy(3, 2)
    until(browser, lambda: text(browser, "#link") == "live")
    assert not browser.find_element(By.ID, "lost").is_displayed()
    scripted.fleet = None
    until(browser, lambda: text(browser, "#lost").startswith("The proxy cannot be reached. What you see is"))
    assert text(browser, "#link") == "not connected"
    assert text(browser, "h1") == "2 of 3 ready"


@browser_test
def test_it_asks_for_the_key_and_keeps_it_for_the_tab(browser: WebDriver, scripted: ScriptedProxy) -> None:
    scripted.key, scripted.fleet = "s3cret", scenes.busy(3, 1)
    browser.get(scripted.url)
    until(browser, lambda: text(browser, "#link") == "needs the API key")
    assert not browser.find_element(By.ID, "main").is_displayed()

    def enter(key: str) -> None:
        browser.find_element(By.ID, "secret").send_keys(key)
        browser.find_element(By.CSS_SELECTOR, "#key button").click()

    enter("wrong")
    until(browser, lambda: text(browser, "#refused") == "The proxy refused that key.")
    enter("s3cret")
    until(browser, lambda: text(browser, "#link") == "live")
    assert not browser.find_element(By.ID, "key").is_displayed()
    browser.refresh()
    until(browser, lambda: text(browser, "#link") == "live")
    assert all("s3cret" not in path for path in scripted.asked)
    assert "s3cret" not in browser.current_url and browser.execute_script("return localStorage.length") == 0  # type: ignore[no-untyped-call]


@browser_test
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [420, 800, 1280])
@pytest.mark.parametrize(("replicas", "versions"), [(2, 0), (64, 50)])
def test_it_fits(
    browser: WebDriver, scripted: ScriptedProxy, replicas: int, versions: int, width: int, scheme: str
) -> None:
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)  # type: ignore[attr-defined]
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)  # type: ignore[attr-defined]
    try:
        show(browser, scripted, scenes.busy(replicas, versions))
        assert len(rows(browser, "#t-replicas")) == replicas
        assert browser.execute_script("return document.documentElement.scrollWidth") == width  # type: ignore[no-untyped-call]
        assert browser.execute_script(CONTRAST) == []  # type: ignore[no-untyped-call]
        assert errors(browser) == []
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})  # type: ignore[attr-defined]


# Texts whose contrast with the panel they lie on is under 4.5 (WCAG AA).
CONTRAST = r"""
const parse = (c) => c.match(/[\d.]+/g).map(Number);
const linear = (v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
const light = (c) => { const [r, g, b] = parse(c).map(linear); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const under = (e) => {
  for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor; if (parse(c)[3] !== 0) return c; }
};
const bad = new Set();
for (const e of document.querySelectorAll('body *')) {
  if (e.tagName === 'SCRIPT' || e.tagName === 'STYLE' || e.tagName === 'title') continue;
  if (![...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim())) continue;
  const style = getComputedStyle(e), a = light(e instanceof SVGElement ? style.fill : style.color), b = light(under(e));
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (ratio < 4.5) bad.add(e.textContent.trim().slice(0, 30) + ' ' + ratio.toFixed(2));
}
return [...bad];
"""
