// Charts: uPlot draws them; every line has a color, a dash and a marker of its own.

const charts = new Set();

function drawMarker(draw, kind, x, y, size) {
  draw.beginPath();
  if (kind === "circle") draw.arc(x, y, size, 0, 2 * Math.PI);
  else if (kind === "square") draw.rect(x - size, y - size, 2 * size, 2 * size);
  else {
    const shapes = {
      triangle: [[0, -1.2], [1.1, 0.9], [-1.1, 0.9]],
      down: [[0, 1.2], [1.1, -0.9], [-1.1, -0.9]],
      diamond: [[0, -1.3], [1.3, 0], [0, 1.3], [-1.3, 0]],
      cross: [[-1, -1], [0, -0.3], [1, -1], [0.3, 0], [1, 1], [0, 0.3], [-1, 1], [-0.3, 0]],
    };
    shapes[kind].forEach(([dx, dy], place) => draw[place ? "lineTo" : "moveTo"](x + dx * size, y + dy * size));
    draw.closePath();
  }
  draw.fill();
}

function swatch(series) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  const line = document.createElementNS(space, "line");
  svg.setAttribute("viewBox", "0 0 30 12");
  svg.setAttribute("aria-hidden", "true");
  Object.entries({ x1: 1, y1: 6, x2: 29, y2: 6, stroke: color(series.color), "stroke-width": 2.5,
    "stroke-dasharray": series.dash.join(" ") }).forEach(([key, value]) => line.setAttribute(key, value));
  const paths = { circle: "M11 6a4 4 0 1 0 8 0a4 4 0 1 0-8 0", square: "M11 2h8v8h-8z", triangle: "M15 1l5 9h-10z",
    down: "M15 11l5-9h-10z", diamond: "M15 1l5 5l-5 5l-5-5z", cross: "M11 2l4 3l4-3l-3 4l3 4l-4-3l-4 3l3-4z" };
  const mark = document.createElementNS(space, "path");
  mark.setAttribute("d", paths[series.marker]);
  mark.setAttribute("fill", color(series.color));
  svg.append(line, mark);
  return svg;
}

// A gain with its interval on a line from -most to most, zero marked.
function intervalPicture(gain, low, high, most) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  const x = (value) => 100 + (95 * value) / most;
  const add = (kind, attributes) => {
    const made = document.createElementNS(space, kind);
    Object.entries(attributes).forEach(([key, value]) => made.setAttribute(key, value));
    svg.append(made);
  };
  const tone = known(low) && low > 0 ? "good" : known(high) && high < 0 ? "bad" : "open";
  Object.entries({ viewBox: "0 0 200 16", class: `interval ${tone}`, "aria-hidden": "true" }).forEach(([key, value]) => svg.setAttribute(key, value));
  add("line", { x1: 100, x2: 100, y1: 0, y2: 16, class: "zero" });
  if (known(low) && known(high)) add("line", { x1: x(low), x2: x(high), y1: 8, y2: 8, class: "range" });
  add("circle", { cx: x(gain), cy: 8, r: 4.5, class: "gain" });
  return svg;
}

function axes(options) {
  const ink = color("--soft");
  const grid = { stroke: color("--grid"), width: 1 };
  const common = { stroke: ink, grid, ticks: grid, font: "12px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif" };
  return [
    { ...common, label: options.xLabel, labelSize: 22, size: 34, space: 70,
      values: options.xFormat ? (u, splits) => splits.map((v) => (v === null ? "" : options.xFormat(v))) : undefined },
    { ...common, label: options.yLabel, labelSize: 22, size: 58,
      values: options.yFormat ? (u, splits) => splits.map((v) => (v === null ? "" : options.yFormat(v))) : undefined },
  ];
}

// A figure that is drawn when it comes into view, and again when its size changes.
function figure(label, make, height = 300) {
  const host = el("div", { class: "plot", role: "img", "aria-label": label });
  host.style.minHeight = `${height}px`;
  let plot = null;
  let width = 0;
  const chart = {
    host,
    draw() {
      width = Math.floor(host.clientWidth);
      if (!host.isConnected || !width) return;
      if (plot) plot.destroy();
      plot = make(host, width, height);
    },
    forget() {
      if (plot) plot.destroy();
      size.disconnect();
      near.disconnect();
      charts.delete(chart);
    },
  };
  const size = new ResizeObserver(() => {
    if (plot && Math.floor(host.clientWidth) !== width) chart.draw();
  });
  const near = new IntersectionObserver((seen) => {
    if (!plot && seen.some((one) => one.isIntersecting)) chart.draw();
  }, { rootMargin: "600px" });
  size.observe(host);
  near.observe(host);
  charts.add(chart);
  return chart;
}

// Lines over a common x: [{label, x, y, low, high, color, dash, marker}].
function lineFigure(lines, options) {
  const hidden = options.hidden || new Set();
  const outputs = new Map();
  const shown = () => lines.filter((line) => !hidden.has(line.label));
  const chart = figure(options.label, (host, width, height) => {
    const visible = shown();
    const xs = [...new Set(visible.flatMap((line) => line.x))].filter(known).sort((a, b) => a - b);
    const place = new Map(xs.map((x, at) => [x, at]));
    const spread = (line, values) => {
      const out = new Array(xs.length).fill(null);
      line.x.forEach((x, at) => { if (known(x)) out[place.get(x)] = values[at]; });
      return out;
    };
    const data = [xs];
    const series = [{}];
    const bands = [];
    for (const line of visible) {
      const stroke = color(line.color);
      data.push(spread(line, line.y));
      series.push({ label: line.label, stroke, width: 2, dash: line.dash, spanGaps: true, points: { show: false },
        paths: options.stepped ? uPlot.paths.stepped({ align: 1 }) : undefined });
      if (!line.low) continue;
      data.push(spread(line, line.high), spread(line, line.low));
      const edge = { stroke: "transparent", width: 0, spanGaps: true, points: { show: false } };
      series.push({ ...edge }, { ...edge });
      bands.push({ series: [series.length - 2, series.length - 1], fill: `${stroke}2e` });
    }
    const range = (u, low, high) => padded(u, ...(options.cutStart ? withoutStart(visible, low, high) : [low, high]));
    const mainOf = (at) => series.findIndex((one) => one.label === visible[at].label);
    return new uPlot({
      width, height, series, bands, axes: axes(options), legend: { show: false },
      scales: { x: { time: false, distr: options.xLog ? 3 : 1 }, y: options.log ? { distr: 3 } : { range } },
      cursor: { drag: { x: true, y: false }, points: { size: 7 } },
      hooks: {
        draw: [(u) => visible.forEach((line, at) => markLine(u, line, u.data[mainOf(at)], at))],
        setCursor: [(u) => {
          const at = u.cursor.idx;
          for (const [label, output] of outputs) {
            const line = series.findIndex((one) => one.label === label);
            const value = at === null || at === undefined || line < 0 ? null : u.data[line][at];
            output.textContent = known(value) ? ` ${options.yFormat ? options.yFormat(value) : metricText(value)}` : "";
          }
          if (options.onCursor) options.onCursor(at === null || at === undefined ? null : u.data[0][at]);
        }],
      },
    }, data, host);
  }, options.height);
  const legend = el("ul", { class: "legend", "aria-label": "Lines of the chart" }, lines.map((line) => {
    const output = el("span", { class: "value", "aria-hidden": "true" });
    outputs.set(line.label, output);
    const button = el("button", { type: "button", "aria-pressed": String(!hidden.has(line.label)), on: { click: () => {
      if (hidden.has(line.label)) hidden.delete(line.label);
      else if (shown().length > 1) hidden.add(line.label);
      button.setAttribute("aria-pressed", String(!hidden.has(line.label)));
      chart.draw();
    } } }, swatch(line), line.label, output);
    return el("li", {}, button);
  }));
  return el("figure", {}, legend, chart.host, options.note ? el("figcaption", {}, options.note) : null);
}

// Untrained models, at chance, would press all else against an edge: the range leaves
// the first point out where that more than halves it.
function withoutStart(lines, low, high) {
  const later = lines.flatMap((line) => [line.y, line.low || [], line.high || []].flatMap((values) => values.slice(1))).filter(known);
  if (later.length < 3) return [low, high];
  const [least, most] = later.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
  return most - least < 0.5 * (high - low) ? [least, most] : [low, high];
}

function padded(u, low, high) {
  if (!known(low) || !known(high)) return [0, 1];
  const room = 0.06 * (high - low) || 0.05 * Math.abs(high) || 0.1;
  return [low - room, high + room];
}

function markLine(u, line, values, at) {
  const every = Math.max(1, Math.round(values.length / 8));
  const draw = u.ctx;
  draw.save();
  draw.fillStyle = color(line.color);
  const first = Math.floor((at * every) / 3) % every;
  values.forEach((value, place) => {
    const last = place === values.length - 1;
    if (!known(value) || (place % every !== first && !last)) return;
    drawMarker(draw, line.marker, u.valToPos(u.data[0][place], "x", true), u.valToPos(value, "y", true), 4 * devicePixelRatio);
  });
  draw.restore();
}

const STATES = {
  harmed: { color: "--harm", marker: "down", words: "worse off" },
  unsure: { color: "--unsure", marker: "circle", words: "could be either" },
  gains: { color: "--personal", marker: "triangle", words: "better off" },
  unknown: { color: "--unsure", marker: "cross", words: "not compared" },
  "not finite": { color: "--harm", marker: "cross", words: "broken" },
};

// Points with a shape for each state: {x, y, low, high, state, name}, arrays.
function scatterFigure(points, options) {
  const order = points.x.map((_, at) => at).filter((at) => known(points.x[at]) && known(points.y[at]));
  order.sort((a, b) => points.x[a] - points.x[b]);
  const tip = el("div", { class: "tip", hidden: true });
  const chart = figure(options.label, (host, width, height) => {
    const nearest = (u, event) => {
      const box = u.over.getBoundingClientRect();
      const [px, py] = [event.clientX - box.left, event.clientY - box.top];
      let best = null;
      let least = 400;
      for (const at of order) {
        const far = (u.valToPos(points.x[at], "x") - px) ** 2 + (u.valToPos(points.y[at], "y") - py) ** 2;
        if (far < least) [best, least] = [at, far];
      }
      return best;
    };
    const made = new uPlot({
      width, height, axes: axes(options), legend: { show: false },
      series: [{}, { stroke: "transparent", width: 0, paths: () => null, points: { show: false } }],
      scales: { x: { time: false, distr: options.xLog ? 3 : 1, range: options.xLog ? logRange : padded },
        y: { range: (u, low, high) => padded(u, Math.min(low ?? 0, 0), Math.max(high ?? 0, 0)) } },
      cursor: { drag: { x: false, y: false }, points: { show: false } },
      hooks: { draw: [(u) => drawPoints(u, points, order, options.selected())] },
    }, [order.map((at) => points.x[at]), order.map((at) => points.y[at])], host);
    made.over.addEventListener("mousemove", (event) => {
      const at = nearest(made, event);
      tip.hidden = at === null;
      made.over.style.cursor = at === null ? "default" : "pointer";
      if (at === null) return;
      tip.textContent = options.tip(at);
      const left = made.valToPos(points.x[at], "x") + made.over.offsetLeft;
      tip.style.left = `${Math.min(left + 10, width - 190)}px`;
      tip.style.top = `${made.valToPos(points.y[at], "y") + made.over.offsetTop - 12}px`;
    });
    made.over.addEventListener("mouseleave", () => { tip.hidden = true; });
    made.over.addEventListener("click", (event) => {
      const at = nearest(made, event);
      if (at !== null) options.pick(at);
    });
    return made;
  }, options.height);
  const present = new Set(order.map((at) => points.state[at]));
  const legend = el("ul", { class: "legend", "aria-label": "Marks of the chart" },
    Object.entries(STATES).filter(([name]) => present.has(name)).map(([, look]) =>
      el("li", { class: "mark" }, swatch({ ...look, dash: [0, 40] }), look.words)));
  return { chart, node: el("figure", { class: "anchor" }, legend, chart.host, tip, el("figcaption", {}, options.note || "")) };
}

const logRange = (u, low, high) => (known(low) && low > 0 ? [low / 1.15, high * 1.15] : [0.1, 10]);

function drawPoints(u, points, order, selected) {
  const draw = u.ctx;
  const size = (order.length > 2000 ? 2.2 : order.length > 300 ? 3 : 4.5) * devicePixelRatio;
  const at = (place) => [u.valToPos(points.x[place], "x", true), u.valToPos(points.y[place], "y", true)];
  draw.save();
  draw.strokeStyle = color("--soft");
  draw.lineWidth = devicePixelRatio;
  const zero = u.valToPos(0, "y", true);
  draw.beginPath();
  draw.moveTo(u.bbox.left, zero);
  draw.lineTo(u.bbox.left + u.bbox.width, zero);
  draw.stroke();
  draw.beginPath();
  draw.rect(u.bbox.left, u.bbox.top, u.bbox.width, u.bbox.height);
  draw.clip();
  const withIntervals = order.length <= 120 ? order : order.filter((place) => place === selected);
  draw.globalAlpha = 0.35;
  for (const place of withIntervals) {
    if (!known(points.low[place]) || !known(points.high[place])) continue;
    const x = at(place)[0];
    draw.beginPath();
    draw.moveTo(x, u.valToPos(points.low[place], "y", true));
    draw.lineTo(x, u.valToPos(points.high[place], "y", true));
    draw.stroke();
  }
  draw.globalAlpha = order.length > 2000 ? 0.6 : 0.9;
  for (const [name, look] of Object.entries(STATES)) {
    draw.fillStyle = color(look.color);
    for (const place of order) if (points.state[place] === name) drawMarker(draw, look.marker, ...at(place), size);
  }
  if (selected !== null && order.includes(selected)) {
    draw.globalAlpha = 1;
    draw.strokeStyle = color("--ink");
    draw.lineWidth = 2 * devicePixelRatio;
    draw.beginPath();
    draw.arc(...at(selected), 2.4 * size, 0, 2 * Math.PI);
    draw.stroke();
  }
  draw.restore();
}
