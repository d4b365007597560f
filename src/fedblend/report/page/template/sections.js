// The sections of the report; each makes its element, or null where there is nothing.

function section(id, heading, about, ...children) {
  return el("section", { id, class: "card", "aria-labelledby": `${id}-heading` },
    el("h2", { id: `${id}-heading` }, heading), about ? el("p", { class: "lead" }, about) : null, ...children);
}

const runColor = (at) => ({ color: `--p${at % 8}`, dash: DASHES[at % DASHES.length], marker: MARKERS[at % MARKERS.length] });
const metricOf = (run, name) => run.metrics.find((one) => one.name === name) || { name, words: name, higher: true };
const direction = (metric) => (metric.higher ? "higher is better" : "lower is better");
const endOf = (run, split, model, metric) =>
  run.ends.find((one) => one.split === split && one.model === model && one.metric === metric);

// A number large, its unit small.
function withUnit(text) {
  const [, value, unit] = /^(\S+)(?: (.*))?$/.exec(text) || [null, text, ""];
  return unit ? [value, " ", el("small", {}, unit)] : [value];
}

function tileOf(words, value, more, tone) {
  return el("div", { class: "tile", "data-tone": tone },
    el("p", { class: "tile-words" }, words), el("p", { class: "tile-value" }, ...withUnit(value)), el("p", { class: "tile-more" }, more || ""));
}

function tiles(content) {
  const run = content.runs[0];
  const head = run?.headline;
  const found = [];
  const tile = (...of) => found.push(tileOf(...of));
  if (content.runs.length > 1 || !head) return found;
  const metric = metricOf(run, head.metric);
  const model = known(head.models.personal) ? "personal" : "shared";
  tile(`${capital(head.split)} ${metric.words}, ${MODELS[model].words}`, shareText(head.models[model], metric),
    ORDER.filter((name) => name !== model && known(head.models[name])).map((name) => `${MODELS[name].words} ${shareText(head.models[name], metric)}`).join(" · "));
  if (head.gain && head.gain.clients) {
    const gain = head.gain;
    const tone = gain.mean_gain_low > 0 ? "good" : gain.mean_gain_high < 0 ? "bad" : "open";
    tile(`Mean gain over ${MODELS[head.other].words === "training alone" ? "training alone" : "the shared model"}`,
      differenceText(gain.mean_gain, metric), `95 % interval ${differenceText(gain.mean_gain_low, metric, false)} to ${differenceText(gain.mean_gain_high, metric)}`, tone);
    tile("Clients clearly worse off", `${countText(gain.count)} of ${countText(gain.clients)}`,
      `${countText(gain.helped)} clearly better off`, gain.count ? "bad" : "good");
  }
  if (run.costs.length && known(run.costs[0].bits_up)) {
    const each = (link) => mean(run.costs.map((cost) => cost[`bits_${link}_each`]?.mean ?? null));
    tile("Sent by a client, mean", bitsText(each("up")), `received ${bitsText(each("down"))}`);
  }
  if (run.costs.length && known(run.costs[0].seconds)) {
    tile("Time for all rounds", secondsText(mean(run.costs.map((cost) => cost.seconds))),
      `compiling ${secondsText(mean(run.costs.map((cost) => cost.compile_seconds ?? null)))}`);
  }
  return found;
}

// ---------------------------------------------------------------- learning curves

const ACROSS = {
  round: { words: "rounds", label: "Rounds of communication", format: countText },
  up: { words: "bits sent by clients", label: "Bits sent by all clients (uplink)", format: bitsText },
  down: { words: "bits sent to clients", label: "Bits sent to all clients (downlink)", format: bitsText },
  both: { words: "bits, both ways", label: "Bits sent both ways, all clients", format: bitsText },
};

function acrossOf(curves, over) {
  if (over === "round") return curves.round;
  if (over === "both") return curves.bits_up.map((bits, at) => (known(bits) ? bits + curves.bits_down[at] : null));
  return curves[`bits_${over}`];
}

function curveLines(content, state) {
  const lines = [];
  content.runs.forEach((run, at) => {
    for (const line of run.curves.lines) {
      if (line.split !== state.split || line.metric !== state.metric || line.of !== state.of) continue;
      if (content.runs.length > 1 && line.model !== state.model) continue;
      const look = content.runs.length > 1 ? runColor(at) : MODELS[line.model] || runColor(at);
      lines.push({ ...look, label: content.runs.length > 1 ? run.label : capital(look.words || line.model),
        x: acrossOf(run.curves, state.over), y: line.v, low: line.low, high: line.high, model: line.model });
    }
  });
  return content.runs.length > 1 ? lines : lines.sort((a, b) => ORDER.indexOf(a.model) - ORDER.indexOf(b.model));
}

function sameCurve(lines) {
  const personal = lines.find((line) => line.model === "personal");
  const shared = lines.find((line) => line.model === "shared");
  if (!personal || !shared || personal.y.some((value, at) => value !== shared.y[at])) return lines;
  return lines.filter((line) => line !== personal).map((line) => (line === shared ? { ...line, label: "Shared model, which is also the personal one" } : line));
}

function curvesSection(content, state, again) {
  const runs = content.runs.filter((run) => run.curves.lines.length);
  if (!runs.length) return section("curves", "Learning curves", null, el("p", { class: "empty" }, "Nothing has been measured yet."));
  const all = (pick) => [...new Set(runs.flatMap((run) => run.curves.lines.map(pick)))];
  const metric = metricOf(runs[0], state.metric);
  const set = (key) => (value) => { state[key] = value; again("curves"); };
  const hasBits = runs.some((run) => (run.curves.bits_up || []).some((bits) => bits > 0));
  const lines = content.runs.length > 1 ? curveLines(content, state) : sameCurve(curveLines(content, state));
  const seeds = Math.max(...runs.map((run) => run.seeds.length));
  const across = ACROSS[state.over];
  const ends = lines.map((line) => `${line.label} ends at ${metricText(line.y.at(-1))}`).join(", ");
  return section("curves", "Learning curves", null,
    el("div", { class: "controls" },
      choice("Metric", runs[0].metrics.map((one) => [one.name, one.words]), state.metric, set("metric")),
      choice("Rows", all((line) => line.split).map((name) => [name, name]), state.split, set("split")),
      content.runs.length > 1 ? choice("Model", all((line) => line.model).map((name) => [name, MODELS[name]?.words || name]), state.model, set("model")) : null,
      choice("Over clients", [["mean", "mean"], ["worst_tenth", "worst tenth"]], state.of, set("of")),
      choice("Against", Object.entries(ACROSS).filter(([key]) => key === "round" || hasBits).map(([key, one]) => [key, one.words]), state.over, set("over"))),
    lines.length ? lineFigure(lines, {
      label: `${metric.words} on ${state.split} rows against ${across.words}. ${ends}.`, hidden: state.hidden, cutStart: true,
      xLabel: across.label, xFormat: across.format, yLabel: `${capital(state.split)} ${metric.words}, ${state.of === "mean" ? "mean" : "worst tenth"} of clients`,
      note: `${capital(metric.words)}: ${direction(metric)}.${seeds > 1 ? ` Lines are means of ${seeds} seeds, bands run from the lowest to the highest seed.` : ""}`,
    }) : el("p", { class: "empty" }, "This was not measured."));
}

// ---------------------------------------------------------------- results of all models

function resultsSection(content) {
  const run = content.runs[0];
  if (content.runs.length !== 1 || !run.ends.length) return null;
  const seeds = run.seeds.length > 1 ? `, mean of ${run.seeds.length} seeds` : "";
  const results = (split) => {
    const rows = run.metrics.flatMap((metric) => ORDER.map((model) => [model, endOf(run, split, model, metric.name)]).filter(([, end]) => end)
      .map(([model, end]) => [capital(MODELS[model].words), metric.words, ...["mean", "weighted", "std", "worst_tenth", "worst"].map((of) => metricText(mean(end[of])))]));
    return table(`${capital(split)} rows after the last round${seeds}`, ["Model", "Metric", "Mean", "Weighted by rows", "Spread", "Worst tenth", "Worst client"], rows, 2);
  };
  return section("results", "Results", run.alone ? `Training alone: ${run.alone}.` : null,
    results(run.splits[0]), ...run.splits.slice(1).map((split) => el("details", {}, el("summary", {}, `${capital(split)} rows`), results(split))),
    run.unseen.length ? table("Clients that took no part in training", ["Model", "Rows", "Metric", "Mean", "Worst tenth", "Worst client"],
      run.unseen[0].map((end) => [MODELS[end.model]?.words || end.model, end.split, end.metric, ...["mean", "worst_tenth", "worst"].map((of) => metricText(mean(end[of])))]), 3) : null);
}

// ---------------------------------------------------------------- several runs

function compareSection(content, state) {
  if (content.runs.length < 2) return null;
  const metric = metricOf(content.runs[0], state.metric);
  const value = (run, model) => {
    const end = endOf(run, state.split, model, state.metric);
    return end ? mean(end.mean) : null;
  };
  const best = (run) => value(run, "personal") ?? value(run, "shared");
  const order = [...content.runs].sort((a, b) => {
    const [one, other] = [best(a), best(b)];
    if (one === null || other === null) return (one === null) - (other === null);
    return metric.higher ? other - one : one - other;
  });
  const gainOf = (run) => (run.headline?.metric === state.metric && run.headline?.split === state.split && run.headline.gain?.clients ? run.headline.gain : null);
  const most = Math.max(1e-9, ...order.map(gainOf).filter(Boolean).flatMap((gain) => [gain.mean_gain_low, gain.mean_gain_high]).filter(known).map(Math.abs));
  const rows = order.map((run) => {
    const gain = gainOf(run);
    const worst = endOf(run, state.split, "personal", state.metric);
    const bits = run.costs.map((cost) => (known(cost.bits_up) ? cost.bits_up + cost.bits_down : null));
    return [run.label, metricText(best(run)), metricText(value(run, "local")), worst ? metricText(mean(worst.worst_tenth)) : MISSING,
      gain ? `${gainText(gain.mean_gain)} (${gainText(gain.mean_gain_low)} to ${gainText(gain.mean_gain_high)})` : MISSING,
      gain ? intervalPicture(gain.mean_gain, gain.mean_gain_low, gain.mean_gain_high, 1.05 * most) : "",
      gain ? `${gain.helped} / ${gain.count}` : MISSING, bitsText(mean(bits)), run.finished ? secondsText(mean(run.costs.map((cost) => cost.seconds ?? null))) : "running"];
  });
  return section("compare", "Runs side by side", `Sorted by ${metric.words} of the personal model on ${state.split} rows, mean over clients and seeds; ${direction(metric)}. Better or worse off are clients whose own 95 % interval excludes 0, each judged by itself: among 20 clients without any difference, at most one is counted on average.`,
    table("Runs, best first", ["Run", `Personal ${metric.words}`, "Training alone", "Worst tenth", "Mean gain (95 % interval)", "Loses ← → gains", "Better / worse off, each by itself", "Bits, both ways", "Time"], rows));
}

function differencesSection(content) {
  if (content.runs.length < 2) return null;
  if (!content.differences.length) {
    return content.untested ? section("differences", "Differences between runs", null, el("p", { class: "empty" }, `Not tested: ${content.untested}.`)) : null;
  }
  const pairs = content.differences.filter((pair) => pair.low !== 0 || pair.high !== 0).sort((a, b) => b.significant - a.significant || (a.p_holm ?? 2) - (b.p_holm ?? 2));
  if (!pairs.length) return section("differences", "Differences between runs", null, el("p", { class: "empty" }, "These runs have the very same numbers."));
  const p = (value) => (known(value) ? (value < 0.0001 ? "< 0.0001" : fixed(value, 4)) : MISSING);
  const rows = pairs.map((pair) => [`${pair.run} over ${pair.other}`, gainText(pair.mean_gain), `${gainText(pair.low)} to ${gainText(pair.high)}`,
    p(pair.p), p(pair.p_holm), pair.significant ? "clear" : "may be chance", `${pair.better} / ${pair.worse}`]);
  const metric = metricOf(content.runs[0], pairs[0].metric);
  return section("differences", "Differences between runs", `Gains in ${metric.words} on ${pairs[0].split} rows, paired by client and row. The corrected p-value allows for all comparisons in this table (Holm).`,
    table(pairs.every((pair) => pair.other === pairs[0].other) ? `Each run against ${pairs[0].other}` : "Each run against each other", ["Comparison", "Mean gain", "95 % interval", "p", "p, corrected", "Verdict", "Clients better / worse"], rows));
}

// ---------------------------------------------------------------- sweeps

// The key of the configuration that these runs vary: alpha if it does.
function sweptKey(runs) {
  const others = new Set(["version", "run.seed", "data.seed"]);
  const keys = Object.keys(runs[0].settings).filter((key) => !others.has(key));
  const values = (key) => new Set(runs.map((run) => run.settings[key]).filter(known));
  const swept = keys.filter((key) => values(key).size > 2 && runs.every((run) => known(run.settings[key])));
  return swept.find((key) => key.endsWith("alpha")) || swept[0] || null;
}

function sweepSection(content, state) {
  const groups = new Map();
  for (const run of content.runs) groups.set(run.algorithm, [...(groups.get(run.algorithm) || []), run]);
  const found = [];
  for (const [algorithm, runs] of groups) {
    const key = runs.length > 2 ? sweptKey(runs) : null;
    if (!key) continue;
    const metric = metricOf(runs[0], state.metric);
    const xs = [...new Set(runs.map((run) => run.settings[key]))].sort((a, b) => a - b);
    const lines = ORDER.map((model) => {
      const at = xs.map((x) => runs.filter((run) => run.settings[key] === x)
        .flatMap((run) => endOf(run, state.split, model, state.metric)?.mean || []).filter(known));
      const several = at.some((values) => values.length > 1);
      const of = (pick) => at.map((values) => (values.length ? pick(values) : null));
      return { ...MODELS[model], label: capital(MODELS[model].words), x: xs, y: of(mean),
        low: several ? of((values) => Math.min(...values)) : undefined, high: several ? of((values) => Math.max(...values)) : undefined };
    }).filter((line) => line.y.some(known));
    const name = key.split(".").at(-1);
    const spread = xs[0] > 0 && xs.at(-1) / xs[0] > 50;
    if (lines.length) found.push(el("h3", {}, `${algorithm}: ${name}`), lineFigure(lines, {
      label: `${metric.words} against ${name}`, xLabel: name === "alpha" ? "alpha, the weight of the shared model" : key, yLabel: `${capital(state.split)} ${metric.words}, mean of clients`,
      xLog: spread, note: `${capital(metric.words)}: ${direction(metric)}. Bands run from the lowest to the highest seed.`,
    }));
  }
  const alpha = content.runs.some((run) => run.settings["algorithm.alpha"] !== undefined);
  return found.length ? section("sweep", alpha ? "Alpha sweep" : "Sweep", alpha ? "0 means training alone, 1 means only the shared model." : null, ...found) : null;
}
