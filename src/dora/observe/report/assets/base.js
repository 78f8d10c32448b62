// Making elements, writing numbers, and what every chart shares: colours, tooltip, tables.

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

// Okabe and Ito, in an order in which neighbours differ in lightness too.
const HUES = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00"];
const DASHES = ["", "7 3", "2 3", "10 3 2 3", "5 2", "1 2"];
const AGES = ["#2f74b5", "#7cb5cf", "#e5b73b", "#db7a2c", "#a8322d"];

const runColour = (index) => HUES[index % HUES.length];
// Runs of one colour differ in their dash. Of several curves of a run, the k-th has another one.
const runDash = (index, k = 0) => DASHES[(index + Math.floor(index / HUES.length) + 2 * k) % DASHES.length];
const versionColour = (version) => HUES[((version % HUES.length) + HUES.length) % HUES.length];
const ageColour = (age) => AGES[Math.max(0, Math.min(age, AGES.length - 1))];
// Black or white, whichever stands out more (WCAG's relative luminance).
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
const percent = (share) => (isNumber(share) ? `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %` : "–");
function seconds(value) {
  if (!isNumber(value)) return "–";
  if (value < 1) return `${number(1000 * value, value < 0.01 ? 1 : 0)} ms`;
  if (value < 120) return `${number(value, 1)} s`;
  const whole = Math.round(value);
  const parts = [Math.floor(whole / 3600), Math.floor((whole % 3600) / 60), whole % 60];
  return parts[0] ? `${parts[0]} h ${parts[1]} min` : `${parts[1]} min ${parts[2]} s`;
}
const sum = (values) => values.reduce((total, value) => total + value, 0);
const nth = (step) => step + 1; // the record counts steps from 0, people from 1: after the n-th, n are trained
const plural = (count, word) => `${number(count)} ${word}${count === 1 ? "" : "s"}`;

// The mark of a run or of a kind, as it is drawn: a colour, and a dash for those who do not see it; faint, or hatched.
function swatch(colour, dash = "", { isLine = true, isFaint = false, isHatched = false } = {}) {
  const stripes = [1, 7, 13].map((x) => s("line", { x1: x, x2: x + 6, y1: 12, y2: 0, stroke: colour, "stroke-width": 1 }));
  const shape = isLine
    ? s("line", { x1: 1, x2: 27, y1: 6, y2: 6, stroke: colour, "stroke-width": isFaint ? 1 : 2, opacity: isFaint ? 0.4 : 1, "stroke-dasharray": dash })
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
const say = (text) => { document.getElementById("say").textContent = text; };

// `head`: names of columns; `rows`: arrays of values; columns in `words` hold text.
function table(head, rows, caption, words = []) {
  const cell = (value, index) =>
    h("td", { class: words.includes(index) ? "words" : null }, typeof value === "number" ? number(value, 4) : value ?? "–");
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    h("table", {},
      h("caption", { class: "unseen" }, caption),
      h("thead", {}, h("tr", {}, head.map((name, i) => h("th", { scope: "col", class: words.includes(i) ? "words" : null }, name)))),
      h("tbody", {}, rows.map((row) => (row instanceof Node ? row : h("tr", {}, row.map(cell)))))));
}

// A chart with its title, what it says in words, and the numbers behind it; `rows` is asked when they are opened.
function figure({ title, note, body, key, head, rows, words, wide }) {
  const behind = !head ? null : h("details", { class: "table", "data-key": `table:${key || title}` },
    h("summary", {}, "The numbers as a table", h("span", { class: "unseen" }, ` of ${title}`)));
  behind?.addEventListener("toggle", () => {
    if (behind.open && behind.childElementCount === 1) behind.append(table(head, rows(), title, words));
  });
  return h("figure", { class: wide ? "wide" : null },
    h("figcaption", {}, h("h3", {}, title), note ? h("p", {}, note) : null), body, behind);
}
const nothing = (text) => h("p", { class: "nothing" }, text);

// Charts know their width only once they are on the page, and again when it changes.
const drawings = new Map();
const watcher = new ResizeObserver((entries) => {
  for (const entry of entries) {
    const known = drawings.get(entry.target);
    const width = Math.round(entry.contentRect.width);
    if (known && width && width !== known.width) { known.width = width; known.draw(width); }
  }
});
function responsive(draw) {
  const box = h("div", { class: "plot" });
  drawings.set(box, { width: 0, draw: (width) => draw(box, width) });
  watcher.observe(box);
  return box;
}
function forget(section) {
  for (const box of drawings.keys()) if (section.contains(box)) { watcher.unobserve(box); drawings.delete(box); }
}
