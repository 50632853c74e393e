"""Take the pictures of docs/playground.md from a running server.

    python scripts/screenshots.py http://127.0.0.1:8000 docs

The server should speculate (`--speculation ngram --gamma 3`), so that there are drafts to be seen. Needs Chromium.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

QUESTION = "Write the numbers from one to ten, then write them again."


def main(url: str, folder: Path) -> None:
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        sys.exit("no Chromium on this machine")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for view, scheme in (("origin", "light"), ("probability", "dark")):
            page = browser.new_page(viewport={"width": 1000, "height": 640}, color_scheme=scheme)  # type: ignore[arg-type]
            page.goto(url)
            page.get_by_label("Temperature").fill("0")
            page.get_by_label("Most tokens").fill("80")
            page.get_by_label(f"by {view}").check()
            page.get_by_label("Message").fill(QUESTION)
            page.keyboard.press("Enter")
            page.locator("article .facts").wait_for(timeout=600_000)
            page.screenshot(path=folder / f"playground-{view}.png")
        page = browser.new_page(viewport={"width": 1000, "height": 560})
        page.goto(f"{url}/live")
        page.locator("#rows tr").first.wait_for()
        page.wait_for_timeout(5000)
        page.screenshot(path=folder / "playground-live.png")
        browser.close()


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(sys.argv[1], Path(sys.argv[2]))
