"""Picture the first screen of a report for both READMEs: docs/report.png and docs/report.zh.png, with their words.

    python docs/picture_report.py [RESULTS]

The report should be that of a quiet `make bench`. `make pictures` runs this program and docs/record_terminal.py. It
needs Chromium and a font with Chinese characters. The words are kept beside each picture (report.txt, report.zh.txt),
so that a test can tell when the product does not say them any more (tests/test_pictures.py).
"""

import hashlib
import json
import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

DOCS = Path(__file__).resolve().parent
SIZE = {"width": 1280, "height": 1330}
SHOWN = """() => [...document.querySelectorAll("h1, h2, p, dt, dd, th, td, summary, label, figcaption, svg text")]
    .filter((each) => each.checkVisibility() && each.getBoundingClientRect().top < innerHeight)
    .map((each) => (each.innerText ?? each.textContent).trim().replace(/\\s+/g, " "))"""


def main() -> None:
    results = Path(sys.argv[1] if len(sys.argv) > 1 else "results")
    summary = json.loads((results / "report" / "summary.json").read_text(encoding="utf-8"))
    # Names of rows and of this machine's parts, which are not words of the product.
    environment = summary["environment"]
    names = dict.fromkeys([*(row["row"] for row in summary["rows"]), environment["cpu"], *environment["gpus"]])
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for locale, name in (("en", "report"), ("zh-CN", "report.zh")):
            page = browser.new_page(viewport=SIZE, locale=locale, color_scheme="light")
            page.goto((results / "report" / "report.html").resolve().as_uri())
            picture = page.screenshot(path=DOCS / f"{name}.png")
            words = [line for line in page.evaluate(SHOWN) if line]
            head = [f"sha256 of {name}.png: {hashlib.sha256(picture).hexdigest()}", f"names: {', '.join(names)}", ""]
            (DOCS / f"{name}.txt").write_text("\n".join([*head, *words]) + "\n", encoding="utf-8")
            print(f"docs/{name}.png and docs/{name}.txt")
        browser.close()


if __name__ == "__main__":
    main()
