"""Screenshots of an HTML page at several window widths, light and dark, for review.

Needs playwright and a Chromium (neither is part of the project's environment):

    pip install playwright && apt install chromium
    python scripts/render_page.py bench-results/report.html pictures --width 1280 --width 390

Prints one JSON line per screenshot: file, whether the page is wider than its window, its requests, script errors.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--width", type=int, action="append", help="of the window, in pixels; repeatable")
    parser.add_argument("--scheme", choices=("light", "dark"), action="append")
    parser.add_argument("--section", help="id of the only element to take; else the whole page")
    parser.add_argument(
        "--check", action="append", default=[], help="id of a radio button to choose; repeatable"
    )
    parser.add_argument("--hover", help="CSS selector of what the pointer is put on")
    parser.add_argument("--no-scripts", action="store_true")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=shutil.which("chromium"))
        for width in given.width or (1280, 390):
            for scheme in given.scheme or ("light", "dark"):
                context = browser.new_context(
                    viewport={"width": width, "height": 900}, color_scheme=scheme, device_scale_factor=1,
                    java_script_enabled=not given.no_scripts,
                )  # fmt: skip
                page, requests, errors = context.new_page(), [], []
                page.on("request", lambda request, seen=requests: seen.append(request.url))
                page.on("pageerror", lambda error, seen=errors: seen.append(str(error)))
                page.goto(given.page.resolve().as_uri())
                for name in given.check:
                    page.locator(f"label[for={name}]").click()
                if given.hover:
                    page.locator(given.hover).first.hover()
                file = given.out / f"{given.section or 'page'}-{width}-{scheme}.png"
                if given.section and not given.hover:
                    page.locator(f"#{given.section}").screenshot(path=file)
                else:
                    page.screenshot(path=file, full_page=not given.hover)
                if not given.no_scripts:
                    wide = page.evaluate("document.documentElement.scrollWidth > innerWidth")
                    print(
                        json.dumps(
                            {"file": str(file), "too_wide": wide, "requests": requests, "errors": errors}
                        )
                    )
                context.close()
        browser.close()


if __name__ == "__main__":
    main()
