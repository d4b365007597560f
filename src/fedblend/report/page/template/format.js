// Elements, numbers with units, and the content of the page.

const MODELS = {
  personal: { words: "personal model", color: "--personal", dash: [], marker: "circle" },
  local: { words: "training alone", color: "--local", dash: [8, 5], marker: "triangle" },
  shared: { words: "shared model", color: "--shared", dash: [2, 4], marker: "square" },
};
const ORDER = ["personal", "local", "shared"];
const DASHES = [[], [8, 5], [2, 4], [12, 4, 2, 4], [5, 3], [14, 5]];
const MARKERS = ["circle", "triangle", "square", "diamond", "cross", "down"];
const MISSING = "–";

// An element; text is always text, never markup.
function el(tag, options = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(options)) {
    if (value === undefined || value === null || value === false) continue;
    if (key === "on") for (const [name, act] of Object.entries(value)) made.addEventListener(name, act);
    else if (key === "class") made.className = value;
    else made.setAttribute(key, value === true ? "" : value);
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined) made.append(child);
  }
  return made;
}

// Decimals as Python writes them: an exact tie goes to the even digit.
function fixed(value, decimals) {
  const usual = value.toFixed(decimals);
  const exact = Math.abs(value).toFixed(Math.min(decimals + 40, 100));
  const end = exact.indexOf(".") + 1 + decimals;
  if (!/^50*$/.test(exact.slice(end))) return usual;
  const down = decimals ? exact.slice(0, end) : exact.slice(0, end - 1);
  if (!"02468".includes(down.at(-1))) return usual;
  return value < 0 ? `-${down}` : down;
}

const minus = (text) => text.replace(/^-/, "−");
const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

function metricText(value, decimals = 4) {
  if (!known(value)) return MISSING;
  return minus(Math.abs(value) >= 1e5 ? value.toPrecision(6) : fixed(value, decimals));
}

function gainText(value, decimals = 4) {
  if (!known(value)) return MISSING;
  return (value > 0 ? "+" : "") + metricText(value, decimals);
}

const countText = (value) =>
  known(value) ? value.toLocaleString("en-US", { maximumFractionDigits: 1 }) : MISSING;

function unitText(value, units, step = 1000) {
  if (!known(value)) return MISSING;
  for (const unit of units.slice(0, -1)) {
    if (Math.abs(value) < 0.9995 * step) return `${threeDigits(value)} ${unit}`;
    value /= step;
  }
  return `${threeDigits(value)} ${units.at(-1)}`;
}

const threeDigits = (value) => (value === 0 ? "0" : String(Number(value.toPrecision(3))));
const bitsText = (bits) => unitText(bits, ["bit", "kbit", "Mbit", "Gbit", "Tbit"]);

function secondsText(value) {
  if (!known(value)) return MISSING;
  if (value < 100) return `${fixed(value, 2)} s`;
  return value < 5400 ? `${threeDigits(value / 60)} min` : `${threeDigits(value / 3600)} h`;
}

function shareText(value, metric) {
  if (!known(value)) return MISSING;
  return metric.share ? `${fixed(100 * value, 1)} %` : threeDigits(value);
}

// The decimals of a metric's column; one of whole numbers has none of its own.
const decimalsOf = (column) => column?.d || 4;

function differenceText(value, metric, unit = true) {
  if (!known(value)) return MISSING;
  const text = metric.share ? `${fixed(100 * value, 1)}${unit ? " points" : ""}` : threeDigits(value);
  return (value > 0 ? "+" : "") + minus(text);
}

const mean = (values) => {
  if (!values.length || !values.every(known)) return null;
  return values.reduce((sum, value) => sum + value, 0) / values.length;
};

// A column of whole numbers and decimals as values; read once, when it is needed.
const read = new WeakMap();
function valuesOf(column) {
  if (!column) return null;
  if (!read.has(column)) {
    const scale = 10 ** column.d;
    read.set(column, column.v.map((value) => (value === null ? null : value / scale)));
  }
  return read.get(column);
}

async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function table(caption, headings, rows, numbersFrom = 1) {
  const cell = (tag, value, place, more = {}) =>
    el(tag, { class: place >= numbersFrom ? "number" : null, ...more }, value);
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    el("table", {}, caption ? el("caption", {}, caption) : null,
      el("thead", {}, el("tr", {}, headings.map((text, place) => cell("th", text, place, { scope: "col" })))),
      el("tbody", {}, rows.map((row) => el("tr", {}, row.map((value, place) =>
        place ? cell("td", value, place) : cell("th", value, place, { scope: "row" })))))));
}

function choice(label, options, value, act) {
  const list = el("select", { on: { change: () => act(list.value) } },
    options.map(([key, text]) => el("option", { value: key, selected: key === value }, text)));
  return el("label", { class: "choice" }, el("span", {}, label), list);
}
