// The remaining sections: costs, the server's rows, columns, configuration.

function costsSection(content) {
  const runs = content.runs.filter((run) => run.costs.length);
  if (!runs.length) return null;
  const rows = runs.map((run) => {
    const of = (name) => mean(run.costs.map((cost) => cost[name] ?? null));
    const range = (link) => {
      const each = run.costs[0][`bits_${link}_each`];
      if (each && each.least === each.most) return bitsText(each.mean);
      return each ? `${bitsText(each.mean)} (${bitsText(each.least)} to ${bitsText(each.most)})` : MISSING;
    };
    const lost = (of("dropped") || 0) + (of("rejected") || 0);
    return [run.label, bitsText(of("bits_up")), range("up"), bitsText(of("bits_down")), range("down"), countText(of("received")), countText(lost),
      secondsText(of("seconds")), secondsText(of("compile_seconds")), secondsText(of("alone_seconds"))];
  });
  return section("costs", "Costs", "Bits are counted from the messages themselves. Times are those of the machine that ran this.",
    table("Bits, answers and seconds", ["Run", "Sent by clients", "By one client", "Sent to clients", "To one client", "Answers", "Lost answers", "Rounds", "Compiling", "Training alone"], rows));
}

function centralSection(content) {
  const runs = content.runs.filter((run) => run.central.length);
  if (!runs.length) return null;
  const rows = runs.flatMap((run) => Object.entries(run.central[0]).flatMap(([split, values]) =>
    Object.keys(values).filter((name) => name !== "rows").map((name) => [run.label, split, countText(values.rows), name,
      metricText(mean(run.central.map((one) => one[split][name]))),
      metricText(mean(endOf(run, split, "shared", name)?.mean || []))])));
  return section("central", "The server's own rows", "Mixed FL trains the shared model on the clients' rows and on rows of the server. Here is the same model on both: a large gap says that the two disagree.",
    table("The shared model", ["Run", "Rows", "Number", "Metric", "On the server's rows", "On the clients' rows, mean"], rows, 2));
}

function columnsSection(content) {
  const run = content.runs.find((one) => one.columns.length);
  if (!run) return null;
  return section("columns", "What was done to every column", "Fitted on training rows only, and part of the saved model.",
    table("Columns of the table", ["Column", "Kind", "Seen", "Done"], run.columns.map((column) => [column.name, column.kind, column.seen, column.done]), 99));
}

function warningsSection(content) {
  const all = content.runs.flatMap((run) => run.warnings.map((line) => (content.runs.length > 1 ? `${run.label}: ${line}` : line)));
  return all.length ? section("warnings", "Warnings", null, el("ul", { class: "lines" }, all.map((line) => el("li", {}, line)))) : null;
}

function originSection(content) {
  const fold = (words, ...inside) => el("details", {}, el("summary", {}, words), ...inside);
  const list = (pairs) => el("dl", { class: "facts" }, pairs.flatMap(([key, value]) =>
    [el("dt", {}, key), el("dd", {}, typeof value === "object" ? JSON.stringify(value) : String(value))]));
  return section("origin", "Configuration and environment", null, content.runs.map((run) => [
    content.runs.length > 1 ? el("h3", {}, run.label) : null,
    run.privacy ? el("p", {}, `Privacy: ${run.privacy}`) : null,
    fold("Configuration, every default explicit", el("pre", { tabindex: "0", "aria-label": "Configuration" }, run.config)),
    fold("Environment and data", list([...Object.entries(run.environment), ...Object.entries(run.data), ["folder", run.folder]])),
  ]).flat());
}

const WORDS = [
  ["Personal model", "The model that a client uses in the end: made from the shared model and its own rows."],
  ["Shared model", "One model for all clients, trained together without sending rows."],
  ["Training alone", "A model that a client trains on its own rows only, for as long as is best."],
  ["Gain", "How much better the personal model is than training alone, on rows that no model has seen in training."],
  ["95 % interval", "Where the true gain lies, in 95 of 100 such cases. A client counts as better or worse off only if its whole interval is above or below zero."],
  ["Alpha", "The weight of the shared model in the personal one: 0 is training alone, 1 is the shared model."],
  ["Worst tenth", "The mean over the tenth of the clients with the worst values."],
];

function wordsSection() {
  return section("words", "Words on this page", null, el("dl", { class: "facts" }, WORDS.flatMap(([key, text]) => [el("dt", {}, key), el("dd", {}, text)])));
}
