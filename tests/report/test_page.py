"""The page in a real browser, without a network: what a reader sees, and can do."""

import copy
import json
import re
import shutil
from pathlib import Path

import pandas as pd
import pytest

from lockstep import files, stats
from lockstep.config import reading
from lockstep.paths import PROJECT
from lockstep.report import comparison, comparison_page, history, page
from lockstep.report.summary import gather
from tests.report.test_comparison_page import folder
from tests.test_stats import blocks

playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install -r requirements-dev.txt")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt install chromium)")
HOSTILE = '</script></svg><script>document.title="stolen"</script>\u202e=1+1'


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def visit(browser):
    """Opens a page from disk, offline; fails the test if it says an error or asks for anything."""
    complaints, contexts = [], []

    def open_page(file: Path, width: int = 1440, **options):
        context = browser.new_context(viewport={"width": width, "height": 900}, offline=True, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: message.type == "error" and complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: request.url.startswith("file:") or complaints.append(request.url))
        page.goto(file.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture(scope="module")
def results(benchmark, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("page") / "results"
    ignored = shutil.ignore_patterns("native", "model", "weights", "dataset")
    shutil.copytree(benchmark.path("results"), folder, ignore=ignored)
    for file in folder.glob("runs/*/*/*/record.json"):  # whatever else this machine did meanwhile
        made = files.read_json(file)
        files.write_json(file, made | {"watch": made["watch"] | {"disturbed": []}})
    return folder


def render(results: Path, **changes) -> Path:
    raw = reading.read([results / "config.yaml"]).source
    summary = gather(reading.parse(copy.deepcopy(raw) | changes), results)
    page.write(summary, results / "report", results / "predict" / "predictions.csv")
    return results / "report" / "report.html"


@pytest.fixture(scope="module")
def report(results) -> Path:
    """A page with everything on it, and texts that try to be more than texts."""
    predictions = results / "predict" / "predictions.csv"
    frame = pd.read_csv(predictions, encoding="utf-8-sig", dtype=str)
    frame.loc[0, "text"] = HOSTILE
    frame.to_csv(predictions, index=False, encoding="utf-8-sig")
    failed = json.loads((results / "runs/exploding/n1/rep1/failed.json").read_text())
    files.write_json(results / "runs/exploding/n1/rep1/failed.json", failed | {"reason": HOSTILE})
    return render(results)


def overflowing(page) -> list[str]:
    """What is wider than the window, other than inside a box that scrolls."""
    return page.evaluate(
        """() => [...document.querySelectorAll("body *")]
            .filter((e) => !e.closest(".scroll, pre, svg") && e.getBoundingClientRect().right > innerWidth + 1)
            .map((e) => e.outerHTML.slice(0, 80))"""
    )


@pytest.mark.parametrize("width", [1440, 390])
def test_everything_is_there_and_nothing_overflows(visit, report, width):
    page = visit(report, width)
    names = ("train_seconds", "step_parts", "losses", "quality", "memory", "setup")
    for name in names:
        picture = page.locator(f"svg[aria-labelledby={name}-title]")
        assert picture.count() == 1
        box = picture.bounding_box()
        assert box["width"] > 300
        assert box["x"] + box["width"] <= width, "none is cut"
        letters = picture.locator("text").evaluate_all(
            "texts => texts.map((text) => text.getBoundingClientRect().height)"
        )
        assert round(min(letters), 3) >= 9, "it can be read"  # a height is the difference of two rounded places
        assert page.locator(f"#{name}-title").inner_text()
    assert overflowing(page) == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.locator("#ranks-title").count() == 0, "a rank for each device of one machine needs no picture"


def test_the_verdict_and_five_rows_are_on_the_first_screen(visit, report):
    """At 1280 x 800; statistics and cautions are folded, and counted."""
    page = visit(report, 1280)
    fifth = page.locator("#rows tbody tr").nth(4)
    for shown in (page.locator(".box", has_text="had the shortest time"), page.locator(".sure summary"), fifth):
        box = shown.bounding_box()
        assert box["y"] + box["height"] < 800
    assert re.search(r"cautions: \d", page.locator(".sure summary").inner_text())
    assert not page.get_by_text("Caution:").is_visible()
    page.locator(".sure summary").click()
    for text in ("steps without dropout", "Caution:"):
        assert page.locator(".sure p:visible", has_text=text).count() == 1


def test_a_phone_has_row_time_speed_up_and_verdict_without_scrolling(visit, report):
    page = visit(report, 390)
    heads = page.locator("#rows thead th:visible").all_inner_texts()
    assert [" ".join(head.split()) for head in heads] == ["row", "same model?", "train s", "speed-up", "status"]
    box = page.locator(".columns .scroll")
    assert box.evaluate("element => element.scrollWidth <= element.clientWidth")
    assert page.evaluate("document.documentElement.scrollHeight") < 14_000


def rows(page) -> list[str]:
    return page.locator("#rows tbody tr:visible th").all_inner_texts()


def test_sorting(visit, report):
    page = visit(report)
    before = rows(page)
    head = page.locator("#rows th[scope=col]", has_text="train s")
    head.get_by_role("button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    seconds = [
        cell.get_attribute("data-sort")
        for cell in page.locator(f"#rows tbody td:nth-child({place(page, 'train s')})").all()
    ]
    known = [float(value) for value in seconds if value]
    assert known == sorted(known)
    assert seconds[-1] == ""  # a row without a figure stays last
    head.get_by_role("button").press("Enter")
    assert head.get_attribute("aria-sort") == "descending"
    assert sorted(rows(page)) == sorted(before)


def place(page, heading: str) -> int:
    return 1 + [re.split(r"\s*\?", text)[0].strip() for text in page.locator("#rows thead th").all_inner_texts()].index(
        heading
    )


def test_filtering(visit, report):
    page = visit(report)
    page.get_by_label("Filter rows").fill("ddp_")
    assert set(rows(page)) == {"ddp_spawn", "ddp_amp"}
    assert page.locator("#count").inner_text() == "2"
    page.get_by_label("Filter rows").fill("")
    assert len(rows(page)) == 12


def test_the_language_switch(visit, report):
    page = visit(report)
    page.get_by_role("button", name="中文").click()
    assert page.evaluate("document.documentElement.lang") == "zh"
    assert page.title() == "Lockstep 报告"
    assert "用时最短" in page.locator("header").inner_text()
    assert "had the shortest time" not in page.locator("header").inner_text()
    assert page.locator("svg tspan.zh", has_text="训练时间").first.is_visible()
    assert page.locator("h2:visible", has_text="所有行").count() == 1
    page.reload()
    assert page.evaluate("document.documentElement.lang") == "zh"
    page.get_by_role("button", name="English").click()
    assert "had the shortest time" in page.locator("header").inner_text()


def test_a_chinese_browser_gets_chinese_until_another_language_is_chosen(visit, report):
    page = visit(report, locale="zh-CN")
    assert page.evaluate("document.documentElement.lang") == "zh"
    assert page.locator("nav").get_attribute("aria-label") == "各节"
    page.get_by_role("button", name="English").click()
    page.reload()
    assert page.evaluate("document.documentElement.lang") == "en"


def test_what_decides_fits_and_the_rest_is_switched_on(visit, report):
    """Without a scroll bar at 1280 pixels; the fastest row is first, and a bar is its share of the longest time."""
    page = visit(report, 1280)
    box = page.locator(".columns .scroll")
    assert box.evaluate("element => element.scrollWidth <= element.clientWidth")
    few = page.locator("#rows thead th:visible").count()
    page.get_by_label(re.compile(r"All \d+ columns")).check()
    assert page.locator("#rows thead th:visible").count() > few
    cells = page.locator("#rows td.time").all()
    seconds = [float(cell.get_attribute("data-sort")) for cell in cells]
    assert seconds == sorted(seconds)
    shares = [float(cell.get_attribute("style").split(":")[1]) for cell in cells]
    assert shares == pytest.approx([value / seconds[-1] for value in seconds], abs=1e-3)


def test_sorting_begins_with_what_is_best(visit, report):
    page = visit(report)
    for heading, first in (("speed-up", max), ("train s", min), ("macro-F1", max)):
        page.locator("#rows th[scope=col]", has_text=heading).get_by_role("button").click()
        cells = page.locator(f"#rows tbody td:nth-child({place(page, heading)})").all()
        values = [float(cell.get_attribute("data-sort")) for cell in cells if cell.get_attribute("data-sort")]
        assert values[0] == first(values)


def test_every_column_says_what_it_means(visit, report):
    page = visit(report)
    heads = page.locator("#rows thead th").all()
    assert all(head.get_attribute("title") for head in heads)
    place = page.locator("#rows thead th", has_text="same model?")
    assert "by its proof" in place.get_attribute("title")
    page.locator("summary", has_text="What the columns mean").click()
    assert page.locator("dd:visible", has_text="Proportional set size").count() == 1
    page.get_by_role("button", name="中文").click()
    assert "按照证明" in place.get_attribute("title")


def test_settings_are_those_that_differ_in_words(visit, report):
    page = visit(report)
    lines = [line.locator("td").all_inner_texts() for line in page.locator(".settings tbody tr").all()]
    assert len(lines) > 1
    for cells in zip(*lines, strict=True):
        assert len({*cells} - {"–"}) > 1
        assert not any(mark in cell for cell in cells for mark in '{}[]"')


def test_marks_say_their_values(visit, report):
    page = visit(report)
    tips = page.locator("svg title").all_text_contents()
    assert any(re.match(r"ddp #1: [\d.]+ s", tip) for tip in tips)


def test_texts_of_the_data_stay_texts(visit, report):
    page = visit(report)
    assert page.title() == "Lockstep report"
    assert page.locator("td", has_text="stolen").count() == 1


def test_a_whole_script_is_copied_by_a_button(visit, report):
    page = visit(report, permissions=["clipboard-read", "clipboard-write"])
    page.locator("#own-script").click()
    entry = page.locator(".own-script", has=page.get_by_text("ddp", exact=True)).first
    entry.locator("summary").click()
    entry.get_by_role("button", name="Copy").click()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == (PROJECT / "docs" / "scripts" / "ddp.py").read_text(encoding="utf-8")


def test_a_link_leads_to_the_command_that_repeats_the_benchmark(visit, report):
    page = visit(report, permissions=["clipboard-read", "clipboard-write"])
    page.locator("nav").get_by_text("Repeat it").click()
    entry = page.locator("dt#again + dd")
    assert entry.locator("code").is_visible(), "the folded part around it is opened"
    entry.get_by_role("button", name="Copy").click()
    assert page.evaluate("navigator.clipboard.readText()") == entry.locator("code").inner_text() != ""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("language", ["", "#zh"])
def test_axe_finds_no_serious_fault(visit, report, scheme, language):
    page = visit(report, color_scheme=scheme)
    if language:
        page.get_by_role("button", name="中文").click()
    assert faults(page) == {}


def faults(page) -> dict[str, list[str]]:
    """What axe has against a page with all of it opened."""
    from axe_playwright_python.sync_playwright import Axe

    for details in page.locator("details").all():
        details.evaluate("element => element.open = true")
    violations = Axe().run(page).response["violations"]
    return {fault["id"]: [node["html"][:120] for node in fault["nodes"]][:3] for fault in violations}


@pytest.fixture(scope="module")
def others(tmp_path_factory) -> dict[str, tuple[Path, str]]:
    """The pages of several results folders, the second of which is faster, and their titles in Chinese."""
    place = tmp_path_factory.mktemp("kept")
    two = [folder(place / name, "Z80", name, {"ddp": times}) for name, times in (("v1", [2, 2.1]), ("v2", [1, 1.05]))]
    line = comparison.Line(
        "ddp", stats.unpaired_ratio(blocks(a=[1, 1.05]), blocks(a=[2, 2.1]), "a"), (2, 1), {"hardware": HOSTILE}
    )
    compared = [comparison.Comparison([line], [HOSTILE], [])]
    made = {
        "comparison": (comparison_page.page(two, compared), "Lockstep 对比"),
        "history": (history.page(history.read(place)[0]), "Lockstep 历史"),
    }
    for name, (text, _) in made.items():
        files.write_text(place / f"{name}.html", text)
    return {name: (place / f"{name}.html", title) for name, (_, title) in made.items()}


@pytest.mark.parametrize("kind", ["comparison", "history"])
@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 360)])
def test_the_other_pages_are_as_good(visit, others, kind, scheme, width):
    file, title = others[kind]
    page = visit(file, width, color_scheme=scheme)
    assert overflowing(page) == []
    assert faults(page) == {}
    page.get_by_role("button", name="中文").click()
    assert page.title() == title
    assert overflowing(page) == []
    assert faults(page) == {}


def test_without_scripts_it_is_still_a_page(visit, report):
    page = visit(report, java_script_enabled=False)
    assert page.locator("#rows tbody tr").count() == 12
    assert "had the shortest time" in page.locator("header").inner_text()


def test_with_the_keyboard_alone(visit, report):
    page = visit(report)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "language"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.tagName") == "SUMMARY"
    for _section in page.locator("nav a").all():
        page.keyboard.press("Tab")
        assert page.evaluate("document.querySelector(document.activeElement.hash).tagName") in ("H2", "DT")
    for _to_the_end_of_the_table in range(40):
        if page.evaluate("document.activeElement.id") == "filter":
            break
        page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "filter"
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"


def test_printing_takes_some_pages_and_folds_nothing_that_is_referred_to(visit, report):
    page = visit(report)
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    assert not page.locator("#filter").is_visible()
    assert page.locator("#rows").is_visible()
    assert page.get_by_text("Caution:").is_visible()
    assert page.locator("dd:visible", has_text="Every run is a fresh process tree").count() == 1
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    page.emulate_media(media="screen")
    assert not page.get_by_text("Caution:").is_visible()
    page.emulate_media(media="print")
    printed = page.pdf(prefer_css_page_size=True)
    assert 2 <= len(re.findall(rb"/Type\s*/Page[^s]", printed)) <= 4


def test_a_page_before_any_run(visit, results, tmp_path):
    empty = Path(
        shutil.copytree(
            results, tmp_path / "results", ignore=shutil.ignore_patterns("runs", "predict", "parity", "profile")
        )
    )
    page = visit(render(empty), 390)
    assert "Nothing to compare yet" in page.locator("header").inner_text()
    assert overflowing(page) == []


@pytest.mark.slow
def test_forty_rows_and_a_long_name(visit, results, tmp_path):
    many = Path(shutil.copytree(results, tmp_path / "results"))
    names = [f"row{number}" for number in range(39)] + ["a_row_whose_name_is_as_long_as_may_be_xx"]
    for name in names:
        shutil.copytree(many / "runs" / "ddp", many / "runs" / name)
    page = visit(
        render(many, rows={"single": {"strategy": "single"}} | {name: {"strategy": "ddp"} for name in names}), 390
    )
    assert page.locator("#rows tbody tr").count() == 41
    assert overflowing(page) == []
    assert (many / "report" / "report.html").stat().st_size < 3_000_000
