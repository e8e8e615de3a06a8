"""report.html in a browser: headless Chromium, driven by selenium. Skipped where there is none."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fusions.machine import import_problem
from tests.trainer.compare.made_up import comparison
from trainer.compare.html import html_report
from trainer.compare.report import make_report

CHROMIUM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
DRIVER = shutil.which("chromedriver")
MISSING = [
    name
    for name, found in (("chromium", CHROMIUM), ("chromedriver", DRIVER), ("selenium", not import_problem("selenium")))
    if not found
]
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        bool(MISSING) and "FUSELINE_REQUIRE_BROWSER" not in os.environ,
        reason=f"no {', '.join(MISSING)} (Debian: apt install chromium chromium-driver)",
    ),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})  # pyright: ignore
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def page(tiny: Path) -> Path:
    path = tiny / "report.html"
    path.write_text(html_report(make_report(*comparison(tiny, all={"drift": 1e-4}), ["compare.py"])))
    return path


def show(browser: Any, page: Path, width: int, scheme: str) -> None:
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(page.as_uri())


def luminance(colour: str) -> float:
    parts = [int(v) / 255 for v in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_report_opens_without_an_error_or_a_request_and_shows_everything(
    browser: Any, page: Path, width: int, scheme: str
) -> None:
    show(browser, page, width, scheme)
    assert browser.get_log("browser") == []
    requests = [
        entry["message"] for entry in browser.get_log("performance") if '"Network.requestWillBeSent"' in entry["message"]
    ]
    assert all("report.html" in message for message in requests)
    headline = browser.find_element("id", "headline")
    assert headline.is_displayed() and "faster" in headline.text and "NOT LOSS-SAFE" in headline.text
    for chart in ("#forest .bar", "#forest .dot", "#ablation-chart .bar", "[data-chart=attribution-chart] .block",
                  "[data-chart=roofline-chart] .block", "#loss-curves polyline", "#loss-drift polyline"):  # fmt: skip
        shapes = browser.find_elements("css selector", chart)
        assert shapes, chart
        boxes = [shape.rect for shape in shapes]
        assert any(box["width"] > 2 and box["height"] > 1 for box in boxes), (chart, boxes)
    # Nothing is wider than the window: wide tables scroll inside their own box.
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    body = browser.find_element("css selector", "body")
    ink, back = (luminance(body.value_of_css_property(name)) for name in ("color", "background-color"))
    assert (max(ink, back) + 0.05) / (min(ink, back) + 0.05) > 7 and (ink > back) == (scheme == "dark")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_enough_contrast(browser: Any, page: Path, scheme: str) -> None:
    show(browser, page, 1280, scheme)
    colours = browser.execute_script(
        """
        const back = e => { while (e) { const c = getComputedStyle(e).backgroundColor;
          if (!c.startsWith('rgba(0, 0, 0, 0')) return c; e = e.parentElement; } return 'rgb(255, 255, 255)'; };
        return [...document.querySelectorAll('h1,h2,p,th,td,small,li,a,b,summary,caption,svg text')]
          .filter(e => e.textContent.trim())
          .map(e => [e.tagName + ' ' + e.textContent.slice(0, 30),
                     e.tagName == 'text' ? getComputedStyle(e).fill : getComputedStyle(e).color, back(e)]);
        """
    )
    assert len(colours) > 100
    for text, ink, back in colours:
        high, low = sorted((luminance(ink), luminance(back)), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 4.5, (text, ink, back)


def test_it_can_be_read_by_keyboard_and_screen_reader(browser: Any, page: Path) -> None:
    show(browser, page, 1280, "light")
    from selenium.webdriver.common.keys import Keys

    body = browser.find_element("css selector", "body")
    body.send_keys(Keys.TAB)
    assert "Skip" in browser.switch_to.active_element.text
    focused = set()
    for _ in range(60):
        active = browser.switch_to.active_element
        focused.add(active.tag_name)
        active.send_keys(Keys.TAB)
    assert {"a", "div", "summary"} <= focused  # links, scrolling tables, details
    for table in browser.find_elements("css selector", "table"):
        assert table.find_elements("css selector", "caption") and table.find_elements("css selector", "th[scope=col]")
    assert all(e.get_attribute("aria-hidden") == "true" for e in browser.find_elements("css selector", ".strip"))
    assert all(e.get_attribute("aria-label") for e in browser.find_elements("css selector", "svg.chart"))
