// The sections of the page, each a function of the runs; `view` keeps what the reader has chosen.

const COLUMNS = (run) => run.curves.columns;
const AXES = {
  step: ["step", (run) => COLUMNS(run).step?.map(nth)],
  time: ["s since the run began", (run) => COLUMNS(run).t_s],
  samples: ["trained samples", (run) => COLUMNS(run).step?.map((step) => nth(step) * run.limits.batch_size * run.limits.group_size)],
};
const axisOf = (run, view) => AXES[view.axis || "step"][1](run) || [];
const axisName = (view) => AXES[view.axis || "step"][0];
const few = (runs) => runs.map((run) => run.label);

// One metric of every run as a chart; with `smooth` the raw curve stays behind it, faint. A rate is smoothed as
// what it is made of: the mean of its values would be that of the shortest steps.
function metricFigure(runs, view, { title, note, names, y = {}, smooth = false, rate = null, refs = [], wide }) {
  const series = [];
  runs.forEach((run) => names.forEach(([name, word], k) => {
    const values = COLUMNS(run)[name];
    if (!values?.some(isNumber)) return;
    const colour = runs.length > 1 ? run.colour : HUES[k];
    const dash = runs.length > 1 ? runDash(run.index, k) : runDash(k);
    const called = [runs.length > 1 ? run.label : null, word].filter(Boolean).join(", ") || title;
    const x = axisOf(run, view);
    const [made, spent] = (rate || []).map((part) => smoothed(COLUMNS(run)[part] || []));
    if (smooth) series.push({ name: called, colour, x, y: values, isFaint: true });
    series.push({ name: called, colour, dash, x, y: rate ? made.map((value, i) => value / spent[i]) : smooth ? smoothed(values) : values, raw: values, run });
  }));
  const drawn = series.filter((one) => !one.isFaint);
  const shown = drawn.length > 0;
  const words = drawn.map((one) => { const values = known(one.raw); return `${one.name} goes from ${number(values[0])} to ${number(values[values.length - 1])}`; }).join("; ");
  return figure({
    title, note, wide,
    body: shown ? h("div", {}, lineChart({ series, x: { label: axisName(view) }, y, refs, label: `${title}: ${words}` }), legend(keysOf(drawn, smooth)))
      : nothing("This run has no such numbers."),
    head: shown && ["step", ...drawn.map((one) => one.name)],
    rows: () => rowsByStep(drawn),
  });
}
// What the lines of a chart are: their names where there are several, and which are means where they are smoothed.
function keysOf(drawn, smooth) {
  const names = drawn.length > 1 ? drawn : [];
  if (!smooth) return names;
  const [{ colour, dash }] = drawn;
  return [...(names.length ? names : [{ name: "running mean", colour, dash }]), { name: names.length ? "faint: each step; others: running mean" : "each step", colour, isFaint: true }];
}
function rowsByStep(series) {
  const byStep = new Map();
  series.forEach((one, k) => COLUMNS(one.run).step.forEach((step, i) => {
    if (!byStep.has(step)) byStep.set(step, series.map(() => null));
    byStep.get(step)[k] = one.raw[i];
  }));
  return [...byStep].sort((a, b) => a[0] - b[0]).map(([step, values]) => [nth(step), ...values]);
}

function evaluationFigure(runs, view) {
  const series = [];
  runs.forEach((run) => [["pass@1", "sampled"], ["greedy_pass", "greedy"], ["reward_mean", "sampled reward"]].forEach(([name, word], k) => {
    const told = run.evaluations.filter((one) => isNumber(one[name]));
    if (!told.length || (k === 2 && series.some((one) => one.run === run))) return;
    const x = told.map((one) => (view.axis === "time" ? one.t_s : view.axis === "samples" ? one.version * run.limits.batch_size * run.limits.group_size : one.version));
    series.push({
      run, x, y: told.map((one) => one[name]), low: told.map((one) => one[`${name}_low`] ?? null), high: told.map((one) => one[`${name}_high`] ?? null),
      name: `${runs.length > 1 ? `${run.label}, ` : ""}${word}`, colour: runs.length > 1 ? run.colour : HUES[k], dash: runs.length > 1 ? runDash(run.index, k) : runDash(k), hasDots: true, word,
    });
  }));
  return figure({
    title: "Accuracy on held-out prompts", note: "Share of answers with a reward of at least 1; bands are 95 % intervals.",
    body: series.length ? h("div", {}, lineChart({ series, x: { label: view.axis && view.axis !== "step" ? axisName(view) : "version" }, y: { low: 0, high: 1, label: "" }, label: `Held-out accuracy: ${series.map((one) => `${one.name} goes from ${percent(one.y[0])} to ${percent(one.y[one.y.length - 1])}`).join("; ")}` }), legend(series))
      : nothing("Nothing was evaluated."),
    head: series.length && ["run", "how", "at", "accuracy", "low", "high"], words: [0, 1],
    rows: () => series.flatMap((one) => one.x.map((x, i) => [one.run.label, one.word, x, one.y[i], one.low[i], one.high[i]])),
  });
}

function learning(runs, view) {
  return [
    evaluationFigure(runs, view),
    metricFigure(runs, view, { title: "Reward in training", names: [["reward/mean", ""]], smooth: true, y: { label: "mean reward of a step" } }),
    metricFigure(runs, view, { title: "Groups that teach nothing", note: "All their rewards are equal.", names: [["reward/frac_zero_std", ""]], smooth: true, y: { low: 0, high: 1, label: "share of groups" } }),
    metricFigure(runs, view, { title: "Entropy", names: [["actor/entropy", ""]], smooth: true, y: { label: "nats per token" } }),
  ];
}

const ENDS = [["trained", HUES[0]], ["filtered", HUES[1]], ["failed", HUES[5]], ["pending", HUES[3]]];
function lengths(runs, view) {
  const spread = (run) => {
    const { to, counts, generated, trained } = run.groups.lengths;
    const names = to.map((upper, i) => (i && upper - to[i - 1] > 1 ? `≤${upper}` : `${upper}`));
    const total = to.map((_, i) => sum(ENDS.map(([end]) => counts[end][i])));
    const series = [{ name: "generated", colour: HUES[4], values: total }, { name: "trained", colour: HUES[0], values: counts.trained }];
    const gap = generated && trained ? trained.mean / generated.mean - 1 : null;
    const words = generated ? `Generated: mean ${number(generated.mean, 1)}, p99 ${generated.p99}, longest ${generated.max}. ` + (trained ? `Trained: mean ${number(trained.mean, 1)} (${gap >= 0 ? "+" : ""}${percent(gap)}).` : "") : "";
    return figure({
      title: runs.length > 1 ? `Lengths, ${run.label}` : "Lengths generated and trained", note: words, key: `lengths:${run.index}`,
      body: generated ? h("div", {}, barChart({ names, series, x: { label: "tokens" }, y: { label: "answers" }, label: `Answers by length. ${words}` }), legend(series.map((one) => ({ ...one, isLine: false })))) : nothing("No answer is finished yet."),
      head: ["up to tokens", ...ENDS.map(([end]) => end)], rows: () => to.map((upper, i) => [upper, ...ENDS.map(([end]) => counts[end][i])]),
    });
  };
  return [
    metricFigure(runs, view, { title: "Length of trained answers", names: [["response_length/mean", "mean"], ["response_length/max", "longest"]], smooth: true, y: { label: "tokens" } }),
    metricFigure(runs, view, { title: "Cut at the longest allowed", names: [["response_length/clip_ratio", ""]], y: { low: 0, label: "share of answers" } }),
    ...runs.map(spread),
  ];
}

function stalenessSection(runs, view) {
  const most = Math.max(...runs.map((run) => Math.max(run.limits.max_staleness, ...Object.keys(run.groups.staleness).map(Number))));
  const names = Array.from({ length: most + 1 }, (_, i) => `${i}`);
  const series = runs.map((run) => {
    const total = sum(Object.values(run.groups.staleness)) || 1;
    return { name: runs.length > 1 ? run.label : "samples", colour: runs.length > 1 ? run.colour : HUES[0], values: names.map((name) => (run.groups.staleness[name] || 0) / total) };
  });
  const bounds = new Set(runs.map((run) => run.limits.max_staleness));
  const words = runs.map((run, i) => `${run.label}: ${names.map((name, k) => `${percent(series[i].values[k])} at ${name}`).join(", ")}, bound ${run.limits.max_staleness}`).join("; ");
  return [
    figure({
      title: "Staleness against its bound", note: `Versions made since the one that sampled, when the step began; ${runs.map((run) => `${runs.length > 1 ? `${run.label} has ` : ""}bound ${run.limits.max_staleness}`).join(", ")}.`,
      body: h("div", {}, barChart({ names, series, x: { label: "versions old" }, y: { label: "share of trained samples" }, mark: bounds.size === 1 ? { after: [...bounds][0], text: `bound ${[...bounds][0]}` } : null, label: `Staleness of trained samples. ${words}` }), runs.length > 1 ? legend(series.map((one) => ({ ...one, isLine: false }))) : null),
      head: ["run", "versions old", "samples"], words: [0], rows: () => runs.flatMap((run) => Object.entries(run.groups.staleness).map(([age, num]) => [run.label, Number(age), num])),
    }),
    metricFigure(runs, view, { title: "Staleness by step", note: "Never above the bound; “allowed” falls below it only with an adaptive bound.", names: [["staleness/mean", "mean"], ["staleness/effective", "allowed"]], y: { low: 0, label: "versions" } }),
  ];
}

function engineSection(runs, view) {
  return runs.map((run) => {
    const { tracks, num_tracks, num_spans, bin_ms, num_moves, num_failed_moves } = run.engines;
    const parts = [`${plural(num_spans, "stay")} of requests on ${plural(num_tracks, "engine")}, ${plural(num_moves, "move")} with KV (${num_failed_moves} failed).`];
    if (num_tracks > tracks.length) parts.push(`The first ${tracks.length} engines are drawn.`);
    if (bin_ms) parts.push(`So many that busy rows are summed over ${number(bin_ms, 1)} ms each.`);
    parts.push("Drag or use the arrow keys to go on, + and − or Ctrl with the wheel to come closer.");
    const timeline = tracks.length ? new Timeline(run, (view.timelines[run.index] ||= {})).element() : nothing("No engine has joined yet.");
    return figure({
      title: runs.length > 1 ? `Engines of ${run.label}` : "Every row of every engine", note: parts.join(" "), body: timeline, wide: true, key: `engines:${run.index}`,
      head: ["engine", "life", "rows", "from (s)", "to (s)", "loads", "moves in", "moves out", "end"], words: [8],
      rows: () => tracks.map((track, i) => [track.engine, track.life, track.rows, track.from / 1000, track.to / 1000, track.loads.length,
        run.engines.moves.filter((move) => move.to === i).length, run.engines.moves.filter((move) => move.from === i).length,
        `${track.replaces === null ? "" : `in the place of engine ${track.replaces}; `}${track.end ? `${track.end}${track.why ? `: ${track.why}` : ""}` : "stayed"}`]),
    });
  });
}

const ROW_CAUSES = [
  ["decoding", "decoding", HUES[0]], ["held", "held while others are rushed, or paused", HUES[3]], ["loading", "stood still for a load", "#8c6d31"],
  ["train", "free: the trainer trained", HUES[5]], ["publish", "free: weights were published", "#f0c987"], ["rewards", "free: rewards were judged", HUES[2]],
  ["answers", "free: other answers went on", HUES[4]], ["weights", "free: no weights yet", "#777777"], ["end", "free: nothing was left to begin", "#b9b9b9"], ["other", "free: other", "#dddddd"],
];
const TRAINER_CAUSES = [
  ["train", "trains", HUES[0]], ["publish", "publishes", HUES[4]], ["answers", "waits for answers", HUES[5]], ["rewards", "waits for rewards", HUES[2]], ["other", "waits, other", "#b9b9b9"],
];
const MAX_BARS = 16; // of single engines
const parts = (causes, spent) => causes.map(([key, name, colour]) => ({ name, colour, value: spent[key] || 0 }));

function waiting(runs) {
  const trainers = runs.map((run) => ({ name: runs.length > 1 ? `trainer, ${run.label}` : "trainer", parts: parts(TRAINER_CAUSES, run.trainer.sums) }));
  const rows = runs.flatMap((run) => {
    const all = {};
    run.rows.forEach(({ spent }) => Object.entries(spent).forEach(([cause, value]) => { all[cause] = (all[cause] || 0) + value; }));
    const named = run.rows.length > 1 ? [{ name: runs.length > 1 ? `all rows, ${run.label}` : "all rows", parts: parts(ROW_CAUSES, all) }] : [];
    const own = runs.length > 1 && run.rows.length > 1 ? [] : run.rows.slice(0, MAX_BARS).map((one) => ({ name: `engine ${one.engine}${one.life ? ` (life ${one.life + 1})` : ""}, ${plural(one.rows, "row")}`, parts: parts(ROW_CAUSES, one.spent) }));
    return [...named, ...own];
  });
  const longestWaits = runs.flatMap((run) => run.trainer.waits.map((wait) => [...(runs.length > 1 ? [run.label] : []), nth(wait.step), wait.from, wait.s, wait.request ?? wait.group, wait.engine, wait.answers_s, wait.rewards_s]));
  return [
    figure({ title: "Where the trainer’s time went", note: "A wait is charged to the answers until the last one of the group that completed the batch, then to its rewards.", body: stackedBars(trainers, seconds),
      head: ["run", ...TRAINER_CAUSES.map(([, name]) => `${name} (s)`)], words: [0], rows: () => runs.map((run) => [run.label, ...TRAINER_CAUSES.map(([key]) => run.trainer.sums[key] || 0)]) }),
    figure({ title: "Where the rows’ time went", note: "Row-seconds. A free row is charged to whoever was then at work on what the next group needs: first the trainer, then rewards, then other answers." + (runs.length === 1 && runs[0].rows.length > MAX_BARS ? ` The first ${MAX_BARS} engines have bars, the table has all.` : ""), body: rows.length ? stackedBars(rows, (value) => `${number(value, 0)} row-s`) : nothing("No engine has joined yet."),
      head: ["run", "engine", ...ROW_CAUSES.map(([, name]) => name)], words: [0], rows: () => runs.flatMap((run) => run.rows.map((one) => [run.label, one.engine, ...ROW_CAUSES.map(([key]) => one.spent[key] || 0)])) }),
    figure({ title: "The trainer’s longest waits", wide: true, note: `Whom it waited for: the last answer of the group that completed the batch. ${runs.map((run) => `${runs.length > 1 ? `${run.label}: ` : ""}${plural(run.trainer.num_waits, "wait")}`).join("; ")} in all.`,
      body: longestWaits.length ? table([...(runs.length > 1 ? ["run"] : []), "step", "from (s)", "waited (s)", "for request", "on engine", "its answer (s)", "its reward (s)"], longestWaits, "The trainer’s longest waits", runs.length > 1 ? [0, 4] : [3]) : nothing("The trainer has not waited.") }),
  ];
}

const PHASES = [["timing_s/train", "trains", HUES[0]], ["timing_s/publish", "publishes", HUES[4]], ["timing_s/wait", "waits", HUES[5]]];
function phases(runs, view) {
  const stacked = runs.map((run) => {
    const layers = PHASES.map(([name, word, colour]) => ({ name: word, colour, values: COLUMNS(run)[name] || [] }));
    const has = layers.some((layer) => layer.values.some(isNumber));
    const totals = layers.map((layer) => `${layer.name} ${seconds(sum(known(layer.values)) * run.curves.every)}`).join(", ");
    return figure({ title: runs.length > 1 ? `Step time, ${run.label}` : "Step time", note: `In all: ${totals}.${run.curves.num > 100 ? " Drawn are means of neighbouring steps." : ""}`, key: `phases:${run.index}`,
      body: has ? h("div", {}, areaChart({ at: inBins(axisOf(run, view), 100), layers: layers.map((layer) => ({ ...layer, values: inBins(layer.values, 100) })), x: { label: axisName(view) }, y: { label: "s per step" }, label: `Time of each step. ${totals}` }), legend(layers.map((layer) => ({ ...layer, isLine: false })))) : nothing("This run has no such numbers."),
      head: has && ["step", ...layers.map((layer) => `${layer.name} (s)`)], rows: () => COLUMNS(run).step.map((step, i) => [nth(step), ...layers.map((layer) => layer.values[i])]) });
  });
  return [
    ...stacked,
    metricFigure(runs, view, { title: "Beside it: generating and judging", names: [["timing_s/rollout", "generating"], ["timing_s/reward", "judging"]], smooth: true, y: { low: 0, label: "s per step" } }),
    metricFigure(runs, view, { title: "Throughput", names: [["perf/throughput", ""]], rate: ["tokens", "timing_s/step"], y: { low: 0, label: "trained tokens/s" } }),
    metricFigure(runs, view, { title: "Rows that decoded", names: [["rollout/busy_ratio", ""]], smooth: true, y: { low: 0, high: 1, label: "share of all rows" } }),
  ];
}

function mismatch(runs, view) {
  return [
    metricFigure(runs, view, { title: "Trainer against engine, same weights", note: "Distance of log-probs; 0 where they are equal bit for bit.", names: [["mismatch/logprob_abs_diff_max", "largest"], ["mismatch/logprob_abs_diff_mean", "mean"]], y: { log: true, label: "nats" } }),
    metricFigure(runs, view, { title: "Policy in training against those that sampled", names: [["off_policy/kl_k3", "KL, k3"]], y: { log: true, label: "nats per token" } }),
    metricFigure(runs, view, { title: "Effective sample size", names: [["off_policy/ess", ""]], y: { high: 1, label: "share of tokens" } }),
    metricFigure(runs, view, { title: "Gradient norm", names: [["actor/grad_norm", ""]], smooth: true, y: { low: 0, label: "before clipping" } }),
  ];
}

function lostGroups(runs) {
  return runs.flatMap((run) => {
    const { ends, reasons, lengths: { to, counts } } = run.groups;
    const names = to.map((upper, i) => (i && upper - to[i - 1] > 1 ? `≤${upper}` : `${upper}`));
    const series = ENDS.slice(1).map(([end, colour]) => ({ name: end, colour, values: counts[end] })).filter((one) => one.values.some(Boolean));
    const title = runs.length > 1 ? `, ${run.label}` : "";
    return [
      figure({ title: `Every group’s end${title}`, note: `${plural(run.groups.num, "group")} admitted. None is dropped for being long or late.`, key: `ends:${run.index}`,
        body: h("div", {}, stackedBars([{ name: "groups", parts: ENDS.map(([end, colour]) => ({ name: end, colour, value: ends[end] })) }], (value) => plural(value, "group")),
          reasons.length ? table(["end", "reason", "groups"], reasons, `Reasons${title}`, [0, 1]) : null),
        head: ["end", "groups"], rows: () => ENDS.map(([end]) => [end, ends[end]]) }),
      figure({ title: `Not trained, by length${title}`, note: "Answers of groups that were filtered, have failed, or wait for their end.", key: `lost:${run.index}`,
        body: series.length ? h("div", {}, barChart({ names, series, x: { label: "tokens" }, y: { label: "answers" }, label: `Answers that were not trained, by length: ${series.map((one) => `${sum(one.values)} ${one.name}`).join(", ")}` }), legend(series.map((one) => ({ ...one, isLine: false })))) : nothing("All finished answers were trained."),
        head: series.length && ["up to tokens", ...series.map((one) => one.name)], rows: () => to.map((upper, i) => [upper, ...series.map((one) => one.values[i])]) }),
    ];
  });
}

function anyMetric(runs, view, redraw) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(COLUMNS(run))))].filter((name) => name !== "step").sort();
  if (!names.length) return [nothing("This run has no metrics.jsonl yet.")];
  if (!names.includes(view.metric)) view.metric = names.includes("actor/pg_loss") ? "actor/pg_loss" : names[0];
  const select = h("select", { id: "metric", onchange: () => { view.metric = select.value; redraw("metrics"); } }, names.map((name) => h("option", { value: name, selected: name === view.metric }, name)));
  const log = h("input", { type: "checkbox", id: "log", checked: view.isLog || null, onchange: () => { view.isLog = log.checked; redraw("metrics"); } });
  return [
    h("div", { class: "tools wide" }, h("label", {}, "Metric", select), h("label", {}, log, "logarithmic")),
    metricFigure(runs, view, { title: view.metric, note: runs.map((run) => run.curves.meanings[view.metric]).find(Boolean), names: [[view.metric, ""]], smooth: true, y: { log: view.isLog, label: "" }, wide: true }),
  ];
}

function settings(runs) {
  const keys = [...new Set(runs.flatMap((run) => Object.entries(run.config).flatMap(([section, own]) => flatKeys(section, own))))];
  if (!keys.length) return [nothing("The run has no config.toml.")];
  const told = (run, key) => { const value = key.split(".").reduce((at, part) => at?.[part], run.config); return value === undefined ? "–" : typeof value === "string" ? value : JSON.stringify(value); };
  const rows = keys.map((key) => {
    const values = runs.map((run) => told(run, key));
    const differs = new Set(values.filter((_, i) => Object.keys(runs[i].config).length)).size > 1;
    return h("tr", { class: differs ? "differs" : null }, h("td", {}, h("code", {}, key)), values.map((value) => h("td", { class: "words" }, value)));
  });
  return [figure({ title: "config.toml", wide: true, note: runs.length > 1 ? "Lines that differ are marked." : null, body: table(["key", ...few(runs)], rows, "Settings of the runs", runs.map((_, i) => i + 1)) })];
}
function flatKeys(prefix, value) {
  if (value === null || typeof value !== "object" || Array.isArray(value)) return [prefix];
  return Object.entries(value).flatMap(([name, own]) => flatKeys(`${prefix}.${name}`, own));
}
