"""Reports in headless Chromium: load time, console errors, what one can do, and screenshots.

    python -m tests.bench.bench_report report.html [--shots FOLDER] [--browser PATH]

Needs playwright, and a Chromium that it has installed or that ``--browser`` names. Exits 1 if a
page logs an error, runs a script that is not its own, asks for anything over the network, does not
fit its window, or takes longer than 3 s to show its charts.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

MOST_S, MOST_BYTES = 3.0, 5_000_000
SIZES = ((1280, 800), (800, 900))
_CPU = "Performance.getMetrics"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--shots", type=Path)
    parser.add_argument("--browser")
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    wrong: list[str] = []
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=options.browser, args=["--no-sandbox"])
        for page in options.pages:
            size = page.stat().st_size
            print(f"{page}: {size:,} bytes")
            if size > MOST_BYTES:
                wrong.append(f"{page} has {size:,} bytes")
            for width, height in SIZES:
                for scheme in ("light", "dark"):
                    wrong += look(browser, page, width, height, scheme, options.shots)
        browser.close()
    print("\n".join(wrong) or "nothing is wrong")
    return 1 if wrong else 0


def look(
    browser: Any, page: Path, width: int, height: int, scheme: str, shots: Path | None
) -> list[str]:
    """Open a page in a window, use it, and say what is wrong."""
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, offline=True
    )
    tab = context.new_page()
    seen: list[str] = []
    tab.on("console", lambda message: message.type == "error" and seen.append(message.text))
    tab.on("pageerror", lambda error: seen.append(str(error)))
    tab.on("dialog", lambda dialog: (seen.append("a dialog opened"), dialog.dismiss()))
    tab.on(
        "request",
        lambda request: request.url.startswith("http") and seen.append(f"asked {request.url}"),
    )
    session = context.new_cdp_session(tab)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    begun = time.perf_counter()
    tab.goto(page.resolve().as_uri())
    tab.wait_for_selector("html[data-ready=yes]", timeout=60_000)
    took = time.perf_counter() - begun
    metrics = {item["name"]: item["value"] for item in session.send(_CPU)["metrics"]}
    busy = metrics.get("TaskDuration", 0.0)
    name = f"{page.stem} {width} {scheme}"
    print(f"{name}: ready after {took:.2f} s, {busy:.2f} s of its main thread (measured)")
    if took > MOST_S:
        seen.append(f"its charts were there after {took:.2f} s")
    if shots is not None:
        shots.mkdir(exist_ok=True)
        tab.screenshot(path=shots / f"{name.replace(' ', '_')}.png", full_page=True)
    over = tab.evaluate("document.documentElement.scrollWidth - innerWidth")
    if over > 0:
        seen.append(f"is {over} px wider than its window")
    seen += use(tab)
    context.close()
    return [f"{name}: {text}" for text in seen]


def use(tab: Any) -> list[str]:
    """Zoom, pan, choose a rank, switch colours; say what did not react."""
    wrong = []
    status = "() => document.getElementById('timeline-status').textContent"

    def changes(what: str, act: Any) -> None:
        before = tab.evaluate(status)
        act()
        tab.wait_for_timeout(120)
        if tab.evaluate(status) == before:
            wrong.append(f"the timeline does not {what}")

    canvas = tab.locator("#timeline-canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + min(40, box["height"] / 3)
    changes("zoom by its button", lambda: tab.locator("[data-zoom='2']").click())
    canvas.focus()
    changes("zoom by keys", lambda: tab.keyboard.press("+"))
    changes("pan by keys", lambda: tab.keyboard.press("ArrowRight"))

    def drag() -> None:
        tab.mouse.move(x, y)
        tab.mouse.down()
        tab.mouse.move(x - 90, y, steps=4)
        tab.mouse.up()

    changes("pan by the mouse", drag)
    changes("show the whole step again", lambda: tab.locator("[data-zoom='0']").click())
    tab.mouse.move(x, y)
    if not tab.locator("#tip").is_visible():
        wrong.append("there is no text at the pointer")
    theme = tab.evaluate("document.documentElement.dataset.theme")
    tab.locator("#theme").click()
    if tab.evaluate("document.documentElement.dataset.theme") == theme:
        wrong.append("the button does not switch colours")
    select = tab.locator("#memory-rank")
    last = tab.evaluate("document.getElementById('memory-rank').options.length - 1")
    select.select_option(str(last))
    if f"rank {last}:" not in tab.locator("#memory-status").text_content():
        wrong.append("memory over time does not follow its choice")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
