// Elements, number formats, and what all charts share: colours, tooltip, tables.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}
const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

// Palette of Okabe and Ito, ordered so that neighbours also differ in lightness.
const HUES = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00"];
const DASHES = ["", "7 3", "2 3", "10 3 2 3", "5 2", "1 2"];
const AGES = ["#2f74b5", "#7cb5cf", "#e5b73b", "#db7a2c", "#a8322d"];

const runColour = (index) => HUES[index % HUES.length];
// Runs of one colour differ in their dash, and so do the curves k = 0, 1, ... of one run.
const runDash = (index, k = 0) => DASHES[(index + Math.floor(index / HUES.length) + 2 * k) % DASHES.length];
const versionColour = (version) => HUES[((version % HUES.length) + HUES.length) % HUES.length];
const ageColour = (age) => AGES[Math.max(0, Math.min(age, AGES.length - 1))];
// Black or white, for the higher contrast (relative luminance of WCAG).
function inkOn(hex) {
  const linear = (x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
  const [r, g, b] = [1, 3, 5].map((at) => linear(parseInt(hex.slice(at, at + 2), 16) / 255));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000" : "#fff";
}
const styled = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
function number(value, digits = 3) {
  if (!isNumber(value)) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(Math.max(0, digits - 2));
  const places = size >= 1000 ? 0 : size >= 100 ? 1 : digits;
  return value.toLocaleString("en-US", { maximumFractionDigits: places });
}
const percent = (fraction) => (isNumber(fraction) ? `${(100 * fraction).toFixed(fraction < 0.1 ? 1 : 0)} %` : "–");
function seconds(value) {
  if (!isNumber(value)) return "–";
  if (value < 1) return `${number(1000 * value, value < 0.01 ? 1 : 0)} ms`;
  if (value < 120) return `${number(value, 1)} s`;
  const whole = Math.round(value);
  const parts = [Math.floor(whole / 3600), Math.floor((whole % 3600) / 60), whole % 60];
  return parts[0] ? `${parts[0]} h ${parts[1]} min` : `${parts[1]} min ${parts[2]} s`;
}
const sum = (values) => values.reduce((total, value) => total + value, 0);
const stepNumber = (step) => step + 1; // files count steps from 0, the page from 1
const plural = (count, word) => `${number(count)} ${word}${count === 1 ? "" : "s"}`;

// The mark of a legend entry: a line with a dash, or a box; faint or hatched as in the chart.
function swatch(colour, dash = "", { isLine = true, isFaint = false, isHatched = false } = {}) {
  const stripes = [1, 7, 13].map((x) => s("line", { x1: x, x2: x + 6, y1: 12, y2: 0, stroke: colour, "stroke-width": 1 }));
  const shape = isLine
    ? s("line", { x1: 1, x2: 27, y1: 6, y2: 6, stroke: colour, "stroke-width": isFaint ? 1 : 2, class: isFaint ? "faint" : "", "stroke-dasharray": dash })
    : isHatched ? [s("rect", { x: 1, y: 0, width: 18, height: 12, fill: "var(--hold)" }), stripes]
      : s("rect", { x: 4, y: 0, width: 12, height: 12, rx: 2, fill: colour });
  return s("svg", { class: "swatch", width: isLine ? 28 : 20, height: 12, "aria-hidden": "true" }, shape);
}
const legend = (entries) =>
  (entries.length ? h("ul", { class: "legend" }, entries.map((e) => h("li", {}, swatch(e.colour, e.dash, e), e.name))) : null);

const tip = document.getElementById("tip");
function showTip(text, x, y) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = x + 14 + box.width > innerWidth ? x - 14 - box.width : x + 14;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, Math.min(y + 14, innerHeight - box.height - 4))}px`;
}
const hideTip = () => { tip.hidden = true; };
const announce = (text) => { document.getElementById("announcer").textContent = text; }; // for screen readers

// `head`: column names; `rows`: arrays of values; `textColumns`: indices of columns with text.
function table(head, rows, caption, textColumns = []) {
  const cell = (value, index) =>
    h("td", { class: textColumns.includes(index) ? "text" : null }, typeof value === "number" ? number(value, 4) : value ?? "–");
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    h("table", {},
      h("caption", { class: "visually-hidden" }, caption),
      h("thead", {}, h("tr", {}, head.map((name, i) => h("th", { scope: "col", class: textColumns.includes(i) ? "text" : null }, name)))),
      h("tbody", {}, rows.map((row) => (row instanceof Node ? row : h("tr", {}, row.map(cell)))))));
}

// A chart with title, note and a table of its numbers; `rows()` is called when the table is opened.
function figure({ title, note, body, key, head, rows, textColumns, wide }) {
  const details = !head ? null : h("details", { class: "table", "data-key": `table:${key || title}` },
    h("summary", {}, "Show as table", h("span", { class: "visually-hidden" }, ` of ${title}`)));
  details?.addEventListener("toggle", () => {
    if (details.open && details.childElementCount === 1) details.append(table(head, rows(), title, textColumns));
  });
  return h("figure", { class: wide ? "wide" : null },
    h("figcaption", {}, h("h3", {}, title), note ? h("p", {}, note) : null), body, details);
}
const emptyNote = (text) => h("p", { class: "empty-note" }, text);

// A chart is drawn when its width is known, and again when the width changes.
const charts = new Map();
const resizeObserver = new ResizeObserver((entries) => {
  for (const entry of entries) {
    const known = charts.get(entry.target);
    const width = Math.round(entry.contentRect.width);
    if (known && width && width !== known.width) { known.width = width; known.draw(width); }
  }
});
function responsive(draw) {
  const box = h("div", { class: "plot" });
  charts.set(box, { width: 0, draw: (width) => draw(box, width) });
  resizeObserver.observe(box);
  return box;
}
function disposeCharts(section) {
  for (const box of charts.keys()) if (section.contains(box)) { resizeObserver.unobserve(box); charts.delete(box); }
}
