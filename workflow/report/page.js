// The page is complete without this: it adds the language switch, sorting and filtering.
"use strict";
const root = document.documentElement;
const titles = { en: document.title, zh: document.querySelector("h1 .zh").textContent };

function speak(language) {
  root.lang = language;
  document.title = titles[language];
  document.getElementById("language").textContent = language === "zh" ? "English" : "中文";
  document.getElementById("language").lang = language === "zh" ? "en" : "zh";
  for (const head of document.querySelectorAll("th[data-zh]")) {
    head.dataset.en ??= head.title;
    head.title = head.dataset[language];
  }
  for (const region of document.querySelectorAll("[data-label]")) {
    region.dataset.labelEn ??= region.ariaLabel;
    region.ariaLabel = language === "zh" ? region.dataset.label : region.dataset.labelEn;
  }
}

document.getElementById("language").hidden = false;
document.getElementById("language").addEventListener("click", () => {
  speak(root.lang === "zh" ? "en" : "zh");
  history.replaceState(null, "", "#" + root.lang);
});
// The language that was chosen here, otherwise the browser's.
speak({ "#zh": "zh", "#en": "en" }[location.hash] ?? (navigator.language.startsWith("zh") ? "zh" : "en"));

function value(row, column) {
  const raw = row.cells[column].dataset.sort;
  return raw === "" ? null : isNaN(raw) ? raw : Number(raw);
}

function compare(a, b) {
  return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
}

for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  for (const head of table.tHead.rows[0].cells) {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      // The first click sorts the best first, the second one the best last.
      const sorted = head.getAttribute("aria-sort"), best = head.dataset.best === "highest" ? "descending" : "ascending";
      const up = (sorted === best ? best === "descending" : best === "ascending");
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const rows = [...body.rows];
      rows.sort((one, two) => {
        const a = value(one, head.cellIndex), b = value(two, head.cellIndex);
        if (a === null || b === null) return (a === null) - (b === null); // rows without a figure are always last
        return up ? compare(a, b) : compare(b, a);
      });
      body.append(...rows);
    });
  }
}

for (const button of document.querySelectorAll("button.copy")) {
  button.hidden = !navigator.clipboard;
  button.addEventListener("click", async () => {
    const copied = button.parentElement.querySelector("code") ?? button.closest("p").nextElementSibling; // beside it, or below
    await navigator.clipboard.writeText(copied.textContent);
    button.classList.add("done"); // shows a mark after the word
  });
}

// A link to a folded part opens it.
function unfold() {
  const target = location.hash.length > 1 && document.getElementById(location.hash.slice(1));
  for (let each = target && target.closest("details"); each; each = each.parentElement.closest("details")) each.open = true;
  if (target) target.scrollIntoView();
}
addEventListener("hashchange", unfold);
unfold();

// Folded parts that belong on paper are open while the page is printed.
const folded = () => document.querySelectorAll("details.section:not([open]), details.sure:not([open]), details.aside:not([open])");
let opened = [];
addEventListener("beforeprint", () => { opened = [...folded()]; for (const each of opened) each.open = true; });
addEventListener("afterprint", () => { for (const each of opened) each.open = false; });

const filter = document.getElementById("filter"); // only the report has a filter
if (filter) document.querySelector(".controls").hidden = false;
// The text of a row in the language that is shown.
const said = (row) => [...row.cells].map((cell) => (cell.querySelector("." + root.lang) ?? cell).textContent).join(" ").toLowerCase();
filter?.addEventListener("input", () => {
  const words = filter.value.toLowerCase().split(/\s+/);
  const rows = [...document.getElementById("rows").tBodies[0].rows];
  for (const row of rows) row.hidden = !words.every((word) => said(row).includes(word));
  document.getElementById("count").textContent = rows.filter((row) => !row.hidden).length;
});
