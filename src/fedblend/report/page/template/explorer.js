// The clients: a chart of gains, a table, and a panel for the client that is chosen.

function clientName(clients, at) {
  return clients.names ? clients.names[at] : `Client ${clients.ids[at]}`;
}

function badge(name) {
  return el("span", { class: "badge", "data-state": name.replace(" ", "-") }, STATES[name].words);
}

function clientColumns(run, content) {
  const clients = run.clients;
  const gain = valuesOf(clients.gains[clients.reference]);
  const low = valuesOf(clients.gains[`${clients.reference}_low`]);
  const high = valuesOf(clients.gains[`${clients.reference}_high`]);
  const column = (key, words, values, text, more = {}) => values && { key, words, value: (at) => values[at], text: (at) => text(values[at]), ...more };
  const decimals = (name) => decimalsOf(clients.columns[name]);
  const split = run.splits[0];
  const metric = metricOf(run, clients.metric || run.metrics[0]?.name);
  const measured = ORDER.map((model) => {
    const name = `${split}_${model}_${metric.name}`;
    return column(name, `${capital(MODELS[model].words)}`, valuesOf(clients.columns[name]), (value) => metricText(value, decimals(name)), { wide: model === "shared" });
  });
  const state = (at) => content.status[clients.status[at]];
  return [
    { key: "name", words: "Client", number: false, value: (at) => clientName(clients, at), text: (at) => clientName(clients, at) },
    clients.reference && { key: "status", words: "Verdict", number: false, value: (at) => clients.status[at], node: (at) => badge(state(at)), smallFirst: true },
    column("gain", "Gain", gain, (value) => gainText(value, decimalsOf(clients.gains[clients.reference]))),
    gain && { key: "low", words: "95 % interval", value: (at) => low[at], wide: true,
      text: (at) => (known(low[at]) || known(high[at]) ? `${gainText(low[at])} to ${gainText(high[at])}` : MISSING) },
    ...measured,
    column("train", "Training rows", valuesOf(clients.columns.train), countText),
    column("test", "Test rows", valuesOf(clients.columns.test), countText, { wide: true }),
    column("alpha", "Alpha", valuesOf(clients.columns.alpha), (value) => metricText(value, decimals("alpha")), { wide: true }),
    column("bits_up", "Bits sent", valuesOf(clients.columns.bits_up), bitsText, { wide: true }),
  ].filter(Boolean);
}

const SCATTER = {
  train: "Training rows of the client",
  alpha: "Alpha, the weight of the shared model",
  rank: "Clients, sorted by gain",
};

function clientScatter(run, content, state, pick) {
  const clients = run.clients;
  const gain = valuesOf(clients.gains[clients.reference]);
  const metric = metricOf(run, clients.metric);
  let x = valuesOf(clients.columns[state.scatter]);
  if (!x) {
    const order = gain.map((_, at) => at).filter((at) => known(gain[at])).sort((a, b) => gain[a] - gain[b]);
    x = new Array(gain.length).fill(null);
    order.forEach((at, rank) => { x[at] = rank + 1; });
  }
  const finite = x.filter((value) => known(value) && value > 0);
  const least = finite.reduce((a, b) => Math.min(a, b), Infinity);
  const most = finite.reduce((a, b) => Math.max(a, b), 0);
  return scatterFigure({
    x, y: gain, low: valuesOf(clients.gains[`${clients.reference}_low`]), high: valuesOf(clients.gains[`${clients.reference}_high`]),
    state: clients.status.map((at) => content.status[at]),
  }, {
    label: `Gain of each client against ${state.scatter === "rank" ? "its rank" : SCATTER[state.scatter]}; the table below has the same numbers.`,
    xLabel: SCATTER[state.scatter], xFormat: countText, xLog: state.scatter === "train" && most / least > 20,
    yLabel: `Gain in ${metric.words}`, height: 380, selected: () => state.selected, pick,
    tip: (at) => `${clientName(clients, at)}: ${gainText(gain[at])}`,
    note: `Above the line a client's personal model beats ${MODELS[clients.reference].words === "training alone" ? "training alone" : "the shared model"}. Choose a point to see the client.`,
  });
}

function clientsSection(content, state) {
  const shown = content.runs.filter((run) => run.clients);
  if (!shown.length) return content.runs.some((run) => !run.finished) ? section("clients", "Clients", null, el("p", { class: "empty" }, "Every client's numbers appear when the run is finished.")) : null;
  const run = shown.find((one) => one.label === state.run) || shown.find((one) => one.clients.reference) || shown[0];
  const clients = run.clients;
  const panel = el("div", { class: "panel", id: "client", "aria-live": "polite" });
  const holder = el("div", {});
  let scatter = null;
  const pick = (at, byKey = false) => {
    state.selected = at;
    panel.replaceChildren(...clientPanel(content, run, at));
    if (scatter) scatter.chart.draw();
    grid.render(true);
    if (byKey) panel.querySelector("h3").focus();
    else if (matchMedia("(max-width: 800px)").matches) panel.scrollIntoView({ block: "nearest" });
  };
  const grid = new ClientTable(clients.ids.length, clientColumns(run, content), {
    selected: () => state.selected, pick, announce: (text) => { document.getElementById("announce").textContent = text; },
  });
  state.grid = grid;
  const drawScatter = () => {
    if (!clients.reference) return;
    if (scatter) scatter.chart.forget();
    scatter = clientScatter(run, content, state, (at) => pick(at));
    holder.replaceChildren(scatter.node);
  };
  const counted = el("p", { class: "counted", role: "status" });
  const search = el("input", { type: "search", placeholder: "Name or id", on: { input: () => narrow() } });
  const narrow = () => {
    const text = search.value.trim().toLowerCase();
    grid.filter((at) => (state.only === "all" || (state.only === "unseen" ? clients.unseen[at] === 1 : content.status[clients.status[at]] === state.only))
      && (!text || clientName(clients, at).toLowerCase().includes(text) || String(clients.ids[at]) === text));
    counted.textContent = `${countText(grid.rows.length)} of ${countText(clients.ids.length)} clients`;
  };
  const states = [...new Set(clients.status)].sort().map((at) => content.status[at]).map((name) => [name, STATES[name].words]);
  if (clients.unseen.length) states.push(["unseen", "took no part in training"]);
  state.only = "all";
  const scatterKeys = Object.keys(SCATTER).filter((key) => key === "rank" || varies(valuesOf(clients.columns[key])));
  if (!scatterKeys.includes(state.scatter)) state.scatter = scatterKeys[0];
  const made = section("clients", "Clients", clients.reference ? `The clients that lose most come first. Gains are in ${metricOf(run, clients.metric).words} on ${run.splits[0]} rows, over ${clients.reference === "local" ? "training alone" : "the shared model"}.` : "This run has no comparison of models, so no client counts as better or worse off.",
    el("div", { class: "controls" },
      shown.length > 1 ? choice("Run", shown.map((one) => [one.label, one.label]), run.label, (value) => { state.run = value; state.selected = null; state.refresh("clients"); }) : null,
      clients.reference ? choice("Chart against", scatterKeys.map((key) => [key, SCATTER[key]]), state.scatter, (value) => { state.scatter = value; drawScatter(); }) : null),
    el("div", { class: clients.reference ? "pair" : "" }, clients.reference ? holder : null, panel),
    el("div", { class: "controls" }, el("label", { class: "choice" }, el("span", {}, "Search"), search),
      clients.reference ? choice("Show", [["all", "all clients"], ...states], "all", (value) => { state.only = value; narrow(); }) : null, counted),
    grid.node,
    clients.left_out.length ? el("p", { class: "note" }, `Left out to keep this file small: ${clients.left_out.join(", ")}. They are in clients.csv.`) : null);
  panel.replaceChildren(...(state.selected === null ? [el("p", { class: "empty" }, "Choose a client in the chart or in the table to see all its numbers here.")] : clientPanel(content, run, state.selected)));
  drawScatter();
  narrow();
  return made;
}

const varies = (values) => Boolean(values) && values.some((value) => known(value) && value !== values.find(known));

const FACTS = {
  train: ["Training rows", countText], validation: ["Validation rows", countText], test: ["Test rows", countText],
  alpha: ["Alpha", metricText], bits_up: ["Bits sent", bitsText], bits_down: ["Bits received", bitsText],
  local_rounds: ["Rounds of training alone", countText], local_model_gradient_norm: ["Gradient norm at the local model", (v) => (known(v) ? v.toExponential(1) : MISSING)],
};

function clientPanel(content, run, at) {
  const clients = run.clients;
  const name = clientName(clients, at);
  const cell = (key) => valuesOf(clients.columns[key])?.[at] ?? null;
  const facts = Object.keys(clients.columns).filter((key) => FACTS[key] && known(cell(key)));
  const models = ORDER.filter((model) => run.splits.some((split) => run.metrics.some((m) => clients.columns[`${split}_${model}_${m.name}`])));
  const rows = (split) => run.metrics.map((metric) => [capital(metric.words),
    ...models.map((model) => metricText(cell(`${split}_${model}_${metric.name}`), decimalsOf(clients.columns[`${split}_${model}_${metric.name}`])))])
    .filter((row) => row.slice(1).some((text) => text !== MISSING));
  const state = content.status[clients.status[at]];
  const measured = (split) => table(`${content.only ? "Your models" : `All models of ${name}`}, ${split} rows`, ["Metric", ...models.map((model) => capital(MODELS[model].words))], rows(split));
  return [
    el("h3", { tabindex: "-1" }, name, " ", clients.reference ? badge(state) : null),
    ...["local", "shared"].filter((other) => clients.gains[other]).map((other) => intervalLine(run, other, at)),
    el("dl", { class: "facts tight" }, facts.flatMap((key) => [el("dt", {}, FACTS[key][0]), el("dd", {}, FACTS[key][1](cell(key)))])),
    models.length ? measured(run.splits[0]) : null,
    ...run.splits.slice(1).filter((split) => rows(split).length).map((split) => el("details", {}, el("summary", {}, `${capital(split)} rows`), measured(split))),
    ...otherRuns(content, run, clients.ids[at], name),
  ].filter(Boolean);
}

// A client's gain over another model, in words and as a picture.
function intervalLine(run, other, at) {
  const of = (name) => valuesOf(run.clients.gains[name])?.[at] ?? null;
  const [gain, low, high] = [of(other), of(`${other}_low`), of(`${other}_high`)];
  const words = `Gain over ${other === "local" ? "training alone" : "the shared model"}`;
  if (!known(gain)) return el("p", { class: "gain" }, `${words}: not known`);
  const ends = known(low) && known(high) ? `95 % interval ${gainText(low)} to ${gainText(high)}` : "too few rows for an interval";
  const most = 1.1 * Math.max(...[gain, low, high].filter(known).map(Math.abs), 1e-9);
  return el("div", { class: "gain" }, el("p", {}, el("span", {}, words), el("strong", {}, gainText(gain)), el("span", { class: "soft" }, ends)), intervalPicture(gain, low, high, most));
}

function otherRuns(content, run, id, name) {
  const others = content.runs.filter((one) => one !== run && one.clients && one.clients.ids.includes(id));
  if (!others.length) return [];
  const rows = [run, ...others].map((one) => {
    const at = one.clients.ids.indexOf(id);
    const metric = metricOf(one, one.clients.metric || one.metrics[0]?.name);
    const value = (model) => valuesOf(one.clients.columns[`${one.splits[0]}_${model}_${metric.name}`])?.[at] ?? null;
    const gain = valuesOf(one.clients.gains[one.clients.reference])?.[at] ?? null;
    return [one.label, metricText(value("personal") ?? value("shared")), gainText(gain), one.clients.reference ? STATES[content.status[one.clients.status[at]]].words : MISSING];
  });
  return [table(`${name} in every run`, ["Run", "Personal model", "Gain", "Verdict"], rows)];
}
