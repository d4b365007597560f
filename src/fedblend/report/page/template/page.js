// The page: its theme and its sections in order.

const LINKS = {
  compare: "Runs", differences: "Differences", results: "Results", curves: "Curves", sweep: "Sweep", clients: "Clients", costs: "Costs",
  central: "Server", columns: "Columns", warnings: "Warnings", origin: "Configuration", words: "Words",
};

function sectionsOf(content, state, again) {
  return {
    compare: () => compareSection(content, state), differences: () => differencesSection(content), curves: () => curvesSection(content, state, again), sweep: () => sweepSection(content, state),
    clients: () => clientsSection(content, state), results: () => resultsSection(content), costs: () => costsSection(content),
    central: () => centralSection(content), columns: () => columnsSection(content), warnings: () => warningsSection(content),
    origin: () => originSection(content), words: () => wordsSection(),
  };
}

function show(content, state) {
  const host = document.getElementById("sections");
  const again = (id) => {
    const old = document.getElementById(id);
    const focus = old && [...old.querySelectorAll("select")].indexOf(document.activeElement);
    const made = sectionsOf(content, state, again)[id]();
    for (const chart of [...charts]) if (old.contains(chart.host)) chart.forget();
    old.replaceWith(made);
    if (focus >= 0) made.querySelectorAll("select")[focus]?.focus();
    if (id === "curves") for (const other of ["compare", "sweep"]) if (document.getElementById(other)) again(other);
  };
  state.refresh = again;
  for (const chart of [...charts]) chart.forget();
  const made = Object.values(sectionsOf(content, state, again)).map((make) => make()).filter(Boolean);
  host.replaceChildren(...made);
  document.getElementById("contents").replaceChildren(...made.map((one) => el("a", { href: `#${one.id}` }, LINKS[one.id])));
  document.getElementById("tiles").replaceChildren(...tiles(content));
  document.getElementById("about").textContent = aboutText(content);
  document.getElementById("verdict").dataset.tone = content.tone;
  document.getElementById("verdict-lines").replaceChildren(...content.verdict.map((line) => el("p", {}, line)));
}

function aboutText(content) {
  const run = content.runs[0];
  if (!run) return "";
  const parts = content.runs.length > 1 ? [`${content.runs.length} runs`] : [run.algorithm];
  const common = (of) => (content.runs.every((one) => of(one) === of(run)) ? of(run) : null);
  parts.push(common((one) => one.clients && `${countText(one.clients.ids.length)} clients`));
  parts.push(common((one) => one.rounds && `${countText(one.rounds)} rounds`));
  parts.push(common((one) => (one.seeds.length === 1 ? `seed ${one.seeds[0]}` : one.seeds.length ? `${one.seeds.length} seeds` : null)));
  if (!run.finished && run.curves.round.length) parts.push(`at round ${countText(run.curves.round.at(-1))}, not finished`);
  return parts.filter(Boolean).join(" · ");
}

function showOne(content) {
  const run = content.runs[0];
  document.getElementById("kind").textContent = "fedblend report for one client";
  document.getElementById("about").textContent = `${run.label} · ${run.algorithm} · ${countText(run.rounds)} rounds`;
  const state = { selected: 0 };
  const [, ...inside] = clientPanel(content, run, state.selected);
  const about = section("client", "Your numbers", "This page holds your numbers only, none of other clients.", ...inside,
    run.alone ? el("p", { class: "note" }, `Training alone: ${run.alone}.`) : null,
    run.privacy ? el("p", { class: "note" }, `Privacy: ${run.privacy}`) : null);
  document.getElementById("sections").replaceChildren(about, wordsSection());
  document.getElementById("contents").remove();
}

// Texts and tables that Python made: the page of fedblend auto, and that of its clients.
function blockOf(block) {
  const cell = (value) => (Array.isArray(value) ? intervalPicture(...value) : value ?? "");
  if (block.heads) return table("", block.heads, block.rows.map((row) => row.map(cell)), block.texts);
  if (block.fold) return el("details", {}, el("summary", {}, block.fold), el("pre", { tabindex: "0" }, block.text));
  if (block.commands) return el("dl", { class: "facts steps" }, block.commands.flatMap(([line, words]) => [el("dt", {}, words), el("dd", {}, el("code", {}, line))]));
  if (block.figures) return el("div", { class: "figures" }, block.figures.map((one) => el("div", {}, el("h3", {}, one.title),
    lineFigure(one.lines.map((line, at) => ({ ...runColor(at), ...line })), { label: one.title, xLabel: block.xLabel, height: 200, stepped: true }))));
  return el("ul", { class: "lines" }, block.lines.map((line) => el("li", {}, line)));
}

function showSections(content) {
  document.documentElement.dataset.texts = "yes";
  if (content.kind) document.getElementById("kind").textContent = content.kind;
  document.getElementById("about").textContent = content.about;
  document.getElementById("tiles").replaceChildren(...content.tiles.map((one) => tileOf(one.words, one.value, one.more, one.tone)));
  document.getElementById("contents").replaceChildren(...content.sections.map((one) => el("a", { href: `#${one.id}` }, one.heading)));
  document.getElementById("sections").replaceChildren(...content.sections.map((one) => section(one.id, one.heading, one.lead, ...one.blocks.map(blockOf))));
}

function firstState(content) {
  const run = content.runs.find((one) => one.metrics.length);
  return { metric: run?.metrics[0].name, split: run?.splits[0], of: "mean", over: "round", model: "personal", hidden: new Set(),
    run: null, scatter: "train", selected: null, only: "all" };
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  const button = document.getElementById("theme");
  button.textContent = name === "dark" ? "Light" : "Dark";
  button.setAttribute("aria-label", `Switch to the ${name === "dark" ? "light" : "dark"} theme`);
  for (const chart of charts) chart.draw();
}

const isDark = () => document.documentElement.dataset.theme === "dark";

function onPaper(state) {
  let before = "light";
  addEventListener("beforeprint", () => {
    before = isDark() ? "dark" : "light";
    setTheme("light");
    if (state.unfold) document.querySelectorAll("details").forEach((one) => { one.open = true; });
    if (state.grid) state.grid.print(40);
  });
  addEventListener("afterprint", () => {
    setTheme(before);
    if (state.grid) state.grid.print(0);
  });
}

async function begin() {
  setTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  document.getElementById("theme").addEventListener("click", () => setTheme(isDark() ? "light" : "dark"));
  document.getElementById("print").addEventListener("click", () => print());
  if (typeof DecompressionStream === "undefined") {
    document.getElementById("sections").textContent = "This browser is too old to show more than the verdict; any browser since 2023 shows all.";
    return;
  }
  const content = await unpacked(document.getElementById("content").textContent);
  const state = content.sections ? {} : content.only ? { unfold: true } : { unfold: true, ...firstState(content) };
  onPaper(state);
  if (content.sections) showSections(content);
  else if (content.only) showOne(content);
  else show(content, state);
  document.documentElement.dataset.ready = "yes";
}

begin();
