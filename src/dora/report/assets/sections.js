// The sections of the page, each a function of the runs; `view` has the user's choices.

const COLUMNS = (run) => run.metrics.columns;
const AXES = {
  step: ["step", (run) => COLUMNS(run).step?.map(stepNumber)],
  time: ["s since the run started", (run) => COLUMNS(run).t_s],
  samples: ["trained samples", (run) => COLUMNS(run).step?.map((step) => stepNumber(step) * run.limits.batch_size * run.limits.group_size)],
};
const axisOf = (run, view) => AXES[view.axis || "step"][1](run) || [];
const axisName = (view) => AXES[view.axis || "step"][0];

// One chart of metrics of all runs. With `smooth` the raw curve stays behind the mean, faint. A `rate` is smoothed as
// numerator and denominator: the mean of its values would favour short steps.
function metricFigure(runs, view, { title, note, names, y = {}, smooth = false, rate = null, refs = [], wide }) {
  const series = [];
  runs.forEach((run) => names.forEach(([name, word], k) => {
    const values = COLUMNS(run)[name];
    if (!values?.some(isNumber)) return;
    const colour = runs.length > 1 ? run.colour : HUES[k];
    const dash = runs.length > 1 ? runDash(run.index, k) : runDash(k);
    const label = [runs.length > 1 ? run.label : null, word].filter(Boolean).join(", ") || title;
    const x = axisOf(run, view);
    const [numerator, denominator] = (rate || []).map((part) => smoothed(COLUMNS(run)[part] || []));
    if (smooth) series.push({ name: label, colour, x, y: values, isFaint: true });
    series.push({ name: label, colour, dash, x, y: rate ? numerator.map((value, i) => value / denominator[i]) : smooth ? smoothed(values) : values, raw: values, run });
  }));
  const drawn = series.filter((one) => !one.isFaint);
  const isShown = drawn.length > 0;
  const description = drawn.map((one) => `${one.name} ${fromTo(known(one.raw).map((value) => number(value)))}`).join("; ");
  return figure({
    title, note, wide,
    body: isShown ? h("div", {}, lineChart({ series, x: { label: axisName(view) }, y, refs, label: `${title}: ${description}` }), legend(curveLegend(drawn, smooth)))
      : emptyNote("This run has no such metric."),
    head: isShown && ["step", ...drawn.map((one) => one.name)],
    rows: () => rowsByStep(drawn),
  });
}
// The first and the last of texts, or the only one.
const fromTo = (texts) => (texts.length > 1 ? `goes from ${texts[0]} to ${texts[texts.length - 1]}` : `is ${texts[0]}`);
// Names of the curves if there are several, and which of them are means if they are smoothed.
function curveLegend(drawn, smooth) {
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
  return [...byStep].sort((a, b) => a[0] - b[0]).map(([step, values]) => [stepNumber(step), ...values]);
}

// Where all rewards are 0 or 1, the mean reward is the fraction of right responses.
const isClose = (one, other) => one === undefined || Math.abs(one - other) < 1e-9;
const isAccuracy = (runs) => runs.every((run) => run.evaluations.every((one) => isClose(one["pass@1"], one.reward_mean) && isClose(one.greedy_pass, one.greedy_reward_mean)));
const scoreName = (runs) => (isAccuracy(runs) ? "accuracy" : "reward");
const HELD_OUT_SCORES = (runs) => (isAccuracy(runs) ? [["pass@1", "sampled"], ["greedy_pass", "greedy"]] : [["reward_mean", "sampled"], ["greedy_reward_mean", "greedy"]]);

// The same for evaluations; a single one with its version.
const scoresOf = (evaluations, name, score) => evaluations.map((one) => `${score(one[name])}${evaluations.length > 1 ? "" : ` at version ${one.version}`}`);

function evaluationFigure(runs, view) {
  const series = [], name = scoreName(runs), score = isAccuracy(runs) ? percent : (value) => number(value, 3);
  runs.forEach((run) => HELD_OUT_SCORES(runs).forEach(([name, word], k) => {
    const found = run.evaluations.filter((one) => isNumber(one[name]));
    if (!found.length) return;
    const x = found.map((one) => (view.axis === "time" ? one.t_s : view.axis === "samples" ? one.version * run.limits.batch_size * run.limits.group_size : one.version));
    series.push({
      run, x, y: found.map((one) => one[name]), low: found.map((one) => one[`${name}_low`] ?? null), high: found.map((one) => one[`${name}_high`] ?? null),
      name: `${runs.length > 1 ? `${run.label}, ` : ""}${word}`, colour: runs.length > 1 ? run.colour : HUES[k], dash: runs.length > 1 ? runDash(run.index, k) : runDash(k), hasDots: true, word,
      description: fromTo(scoresOf(found, name, score)),
    });
  }));
  return figure({
    title: `${name[0].toUpperCase()}${name.slice(1)} on held-out prompts`, note: isAccuracy(runs) ? "Fraction of right responses; bands are 95 % confidence intervals." : "Mean reward of the responses.",
    body: series.length ? h("div", {}, lineChart({ series, x: { label: view.axis && view.axis !== "step" ? axisName(view) : "version" }, y: isAccuracy(runs) ? { low: 0, high: 1, label: "" } : { label: "" }, label: `Held-out ${name}: ${series.map((one) => `${one.name} ${one.description}`).join("; ")}` }), legend(series))
      : emptyNote("This run has no evaluations."),
    head: series.length && ["run", "responses", "at", name, "low", "high"], textColumns: [0, 1],
    rows: () => series.flatMap((one) => one.x.map((x, i) => [one.run.label, one.word, x, one.y[i], one.low[i], one.high[i]])),
  });
}

function learning(runs, view) {
  const reward = metricFigure(runs, view, { title: "Reward in training", names: [["reward/mean", ""]], smooth: true, y: { label: "mean reward of a step" } });
  const evaluation = evaluationFigure(runs, view);
  return [
    ...(runs.some((run) => run.evaluations.length) ? [evaluation, reward] : [reward, evaluation]),
    metricFigure(runs, view, { title: "Groups without gradient", note: "All rewards of the group are equal.", names: [["reward/frac_zero_std", ""]], smooth: true, y: { low: 0, high: 1, label: "fraction of groups" } }),
    metricFigure(runs, view, { title: "Entropy", names: [["actor/entropy", ""]], smooth: true, y: { label: "nats per token" } }),
  ];
}

const OUTCOMES = [["trained", HUES[0]], ["filtered", HUES[1]], ["failed", HUES[5]], ["pending", HUES[3]]];
const bucketNames = (to) => to.map((upper, i) => (i && upper - to[i - 1] > 1 ? `≤${upper}` : `${upper}`));
function lengths(runs, view) {
  const histogram = (run) => {
    const { to, counts, generated, trained } = run.groups.lengths;
    const total = to.map((_, i) => sum(OUTCOMES.map(([outcome]) => counts[outcome][i])));
    const series = [{ name: "generated", colour: HUES[4], values: total }, { name: "trained", colour: HUES[0], values: counts.trained }];
    const drift = generated && trained ? trained.mean / generated.mean - 1 : null;
    const note = generated ? `Generated: mean ${number(generated.mean, 1)}, p99 ${generated.p99}, longest ${generated.max}. ` + (trained ? `Trained: mean ${number(trained.mean, 1)} (${drift >= 0 ? "+" : ""}${percent(drift)}).` : "") : "";
    return figure({
      title: runs.length > 1 ? `Lengths, ${run.label}` : "Lengths generated and trained", note, key: `lengths:${run.index}`,
      body: generated ? h("div", {}, barChart({ names: bucketNames(to), series, x: { label: "tokens" }, y: { label: "responses" }, label: `Responses by length. ${note}` }), legend(series.map((one) => ({ ...one, isLine: false })))) : emptyNote("No response has finished yet."),
      head: ["up to tokens", ...OUTCOMES.map(([outcome]) => outcome)], rows: () => to.map((upper, i) => [upper, ...OUTCOMES.map(([outcome]) => counts[outcome][i])]),
    });
  };
  return [
    metricFigure(runs, view, { title: "Length of trained responses", names: [["response_length/mean", "mean"], ["response_length/max", "longest"]], smooth: true, y: { label: "tokens" } }),
    metricFigure(runs, view, { title: "Clipped at the maximum length", names: [["response_length/clip_ratio", ""]], y: { low: 0, label: "fraction of responses" } }),
    ...runs.map(histogram),
  ];
}

function stalenessSection(runs, view) {
  const highest = Math.max(...runs.map((run) => Math.max(run.limits.max_staleness, ...Object.keys(run.groups.staleness).map(Number))));
  const names = Array.from({ length: highest + 1 }, (_, i) => `${i}`);
  const series = runs.map((run) => {
    const total = sum(Object.values(run.groups.staleness)) || 1;
    return { name: runs.length > 1 ? run.label : "samples", colour: runs.length > 1 ? run.colour : HUES[0], values: names.map((name) => (run.groups.staleness[name] || 0) / total) };
  });
  const bounds = new Set(runs.map((run) => run.limits.max_staleness));
  const description = runs.map((run, i) => `${run.label}: ${names.map((name, k) => `${percent(series[i].values[k])} at ${name}`).join(", ")}, bound ${run.limits.max_staleness}`).join("; ");
  return [
    figure({
      title: "Staleness and its bound", note: `Step - version of the trained samples; ${runs.map((run) => `${runs.length > 1 ? `${run.label} has ` : ""}bound ${run.limits.max_staleness}`).join(", ")}.`,
      body: h("div", {}, barChart({ names, series, x: { label: "staleness" }, y: { label: "fraction of trained samples" }, mark: bounds.size === 1 ? { after: [...bounds][0], text: `bound ${[...bounds][0]}` } : null, label: `Staleness of trained samples. ${description}` }), runs.length > 1 ? legend(series.map((one) => ({ ...one, isLine: false }))) : null),
      head: ["run", "staleness", "samples"], textColumns: [0], rows: () => runs.flatMap((run) => Object.entries(run.groups.staleness).map(([age, num]) => [run.label, Number(age), num])),
    }),
    metricFigure(runs, view, { title: "Staleness by step", note: "The bound varies only with an adaptive bound.", names: [["staleness/mean", "mean"], ["staleness/bound", "bound"]], y: { low: 0, label: "versions" } }),
  ];
}

function engineSection(runs, view) {
  return runs.map((run) => {
    const { tracks, num_tracks, num_spans, bin_ms, migrations, num_migrations, num_failed_migrations } = run.engines;
    const notes = [`${plural(num_spans, "request span")} on ${plural(num_tracks, "engine")}, ${plural(num_migrations, "migration")} (${num_failed_migrations} failed).`];
    if (num_tracks > tracks.length) notes.push(`The first ${tracks.length} engines are drawn.`);
    if (bin_ms) notes.push(`The run has so many spans that occupied rows are summed over ${number(bin_ms, 1)} ms each.`);
    notes.push("Drag or use the arrow keys to move, + and − or Ctrl with the wheel to zoom.");
    const timeline = tracks.length ? new Timeline(run, (view.timelines[run.index] ||= {})).element() : emptyNote("No engine has joined yet.");
    const describeEnd = (track) => `${track.replaces === null ? "" : `replaces engine ${track.replaces}; `}${track.end ? `${track.end}${track.reason ? `: ${track.reason}` : ""}` : "running"}`;
    return figure({
      title: runs.length > 1 ? `Engines of ${run.label}` : "Rows of all engines", note: notes.join(" "), body: timeline, wide: true, key: `engines:${run.index}`,
      head: ["engine", "attempt", "rows", "from (s)", "to (s)", "loads", "migrations in", "migrations out", "end"], textColumns: [8],
      rows: () => tracks.map((track, i) => [track.engine, track.attempt + 1, track.rows, track.from / 1000, track.to / 1000, track.loads.length,
        migrations.filter((one) => one.to === i).length, migrations.filter((one) => one.from === i).length, describeEnd(track)]),
    });
  });
}

const ROW_CAUSES = [
  ["decoding", "decoding", HUES[0]], ["paused", "paused for stragglers or for the trainer", HUES[3]], ["loading", "paused for a weight load", "#8c6d31"],
  ["train", "free: the trainer trained", HUES[5]], ["publish", "free: weights were published", "#f0c987"], ["scoring", "free: responses were scored", HUES[2]],
  ["generation", "free: other rows decoded", HUES[4]], ["weights", "free: no weights yet", "#777777"], ["end", "free: no groups left to admit", "#b9b9b9"], ["other", "free: other", "#dddddd"],
];
const TRAINER_CAUSES = [
  ["train", "trains", HUES[0]], ["publish", "publishes", HUES[4]], ["generation", "waits for responses", HUES[5]], ["scoring", "waits for scores", HUES[2]], ["other", "waits, other", "#b9b9b9"],
];
const MAX_BARS = 16; // of single engines
const parts = (causes, spent) => causes.map(([key, name, colour]) => ({ name, colour, value: spent[key] || 0 }));

function idleTime(runs) {
  const isMany = runs.length > 1;
  const trainers = runs.map((run) => ({ name: isMany ? `trainer, ${run.label}` : "trainer", parts: parts(TRAINER_CAUSES, run.trainer.sums) }));
  const bars = runs.flatMap((run) => {
    const all = {};
    run.rows.forEach(({ row_s }) => Object.entries(row_s).forEach(([cause, value]) => { all[cause] = (all[cause] || 0) + value; }));
    const total = run.rows.length > 1 ? [{ name: isMany ? `all rows, ${run.label}` : "all rows", parts: parts(ROW_CAUSES, all) }] : [];
    const single = isMany && run.rows.length > 1 ? [] : run.rows.slice(0, MAX_BARS).map((one) => ({ name: `engine ${one.engine}${one.attempt ? ` (attempt ${one.attempt + 1})` : ""}, ${plural(one.rows, "row")}`, parts: parts(ROW_CAUSES, one.row_s) }));
    return [...total, ...single];
  });
  const longestWaits = runs.flatMap((run) => run.trainer.waits.map((wait) => [...(isMany ? [run.label] : []), stepNumber(wait.step), wait.from, wait.s, wait.request ?? wait.group, wait.engine, wait.generation_s, wait.scoring_s]));
  const numWaits = runs.map((run) => `${isMany ? `${run.label}: ` : ""}${plural(run.trainer.num_waits, "wait")}`).join("; ");
  return [
    figure({ title: "Time of the trainer", note: "A wait counts as waiting for responses until the last one of the group that completed the batch, then as waiting for its scores.", body: stackedBars(trainers, seconds),
      head: ["run", ...TRAINER_CAUSES.map(([, name]) => `${name} (s)`)], textColumns: [0], rows: () => runs.map((run) => [run.label, ...TRAINER_CAUSES.map(([key]) => run.trainer.sums[key])]) }),
    figure({ title: "Time of the rows", note: "In row-seconds. A free row waits for whatever delays the next group: the trainer, else scoring, else responses in other rows." + (!isMany && runs[0].rows.length > MAX_BARS ? ` The first ${MAX_BARS} engines have bars, the table has all.` : ""), body: bars.length ? stackedBars(bars, (value) => `${number(value, 0)} row-s`) : emptyNote("No engine has joined yet."),
      head: ["run", "engine", ...ROW_CAUSES.map(([, name]) => name)], textColumns: [0], rows: () => runs.flatMap((run) => run.rows.map((one) => [run.label, one.engine, ...ROW_CAUSES.map(([key]) => one.row_s[key] || 0)])) }),
    figure({ title: "Longest waits of the trainer", wide: true, note: `Each with the last response of the group that completed the batch. ${numWaits} in all.`,
      body: longestWaits.length ? table([...(isMany ? ["run"] : []), "step", "from (s)", "waited (s)", "for request", "on engine", "generation (s)", "scoring (s)"], longestWaits, "Longest waits of the trainer", isMany ? [0, 4] : [3]) : emptyNote("The trainer has not waited.") }),
  ];
}

const TRAINER_PHASES = [["timing_s/train", "train", HUES[0]], ["timing_s/publish", "publish", HUES[4]], ["timing_s/wait_for_batch", "wait for batch", HUES[5]]];
function stepTiming(runs, view) {
  const stacked = runs.map((run) => {
    const layers = TRAINER_PHASES.map(([name, word, colour]) => ({ name: word, colour, values: COLUMNS(run)[name] || [] }));
    const isMeasured = layers.some((layer) => layer.values.some(isNumber));
    const totals = layers.map((layer) => `${layer.name} ${seconds(sum(known(layer.values)) * run.metrics.every)}`).join(", ");
    return figure({ title: runs.length > 1 ? `Step time, ${run.label}` : "Step time", note: `In all: ${totals}.${run.metrics.num > 100 ? " Points are means of neighbouring steps." : ""}`, key: `timing:${run.index}`,
      body: isMeasured ? h("div", {}, areaChart({ at: binMeans(axisOf(run, view), 100), layers: layers.map((layer) => ({ ...layer, values: binMeans(layer.values, 100) })), x: { label: axisName(view) }, y: { label: "s per step" }, label: `Time of each step. ${totals}` }), legend(layers.map((layer) => ({ ...layer, isLine: false })))) : emptyNote("This run has no such metrics."),
      head: isMeasured && ["step", ...layers.map((layer) => `${layer.name} (s)`)], rows: () => COLUMNS(run).step.map((step, i) => [stepNumber(step), ...layers.map((layer) => layer.values[i])]) });
  });
  return [
    ...stacked,
    metricFigure(runs, view, { title: "Generation and scoring, in parallel", names: [["timing_s/rollout", "generation"], ["timing_s/reward", "scoring"]], smooth: true, y: { low: 0, label: "s per step" } }),
    metricFigure(runs, view, { title: "Throughput", names: [["perf/throughput", ""]], rate: ["num_response_tokens", "timing_s/step"], y: { low: 0, label: "trained tokens/s" } }),
    metricFigure(runs, view, { title: "Rollout utilisation", note: "Rows that decoded.", names: [["rollout/utilization", ""]], smooth: true, y: { low: 0, high: 1, label: "fraction of row time" } }),
  ];
}

function mismatch(runs, view) {
  return [
    metricFigure(runs, view, { title: "Trainer and engine, same weights", note: "Absolute difference of log-probs; 0 means bit for bit equal.", names: [["mismatch/logprob_abs_diff_max", "largest"], ["mismatch/logprob_abs_diff_mean", "mean"]], y: { log: true, label: "nats" } }),
    metricFigure(runs, view, { title: "Behaviour policy and policy in training", names: [["off_policy/kl_k3", "KL, k3"]], y: { log: true, label: "nats per token" } }),
    metricFigure(runs, view, { title: "Effective sample size", names: [["off_policy/ess", ""]], y: { high: 1, label: "fraction of tokens" } }),
    metricFigure(runs, view, { title: "Gradient norm", names: [["actor/grad_norm", ""]], smooth: true, y: { low: 0, label: "before clipping" } }),
  ];
}

function groupOutcomes(runs) {
  return runs.flatMap((run) => {
    const { outcomes, reasons, lengths: { to, counts } } = run.groups;
    const series = OUTCOMES.slice(1).map(([outcome, colour]) => ({ name: outcome, colour, values: counts[outcome] })).filter((one) => one.values.some(Boolean));
    const suffix = runs.length > 1 ? `, ${run.label}` : "";
    return [
      figure({ title: `Outcomes of all groups${suffix}`, note: `${plural(run.groups.num, "group")} admitted. No group is dropped for being long or late.`, key: `outcomes:${run.index}`,
        body: h("div", {}, stackedBars([{ name: "groups", parts: OUTCOMES.map(([outcome, colour]) => ({ name: outcome, colour, value: outcomes[outcome] })) }], (value) => plural(value, "group")),
          reasons.length ? table(["outcome", "reason", "groups"], reasons, `Reasons${suffix}`, [0, 1]) : null),
        head: ["outcome", "groups"], rows: () => OUTCOMES.map(([outcome]) => [outcome, outcomes[outcome]]) }),
      figure({ title: `Not trained, by length${suffix}`, note: "Finished responses of filtered, failed and pending groups.", key: `untrained:${run.index}`,
        body: series.length ? h("div", {}, barChart({ names: bucketNames(to), series, x: { label: "tokens" }, y: { label: "responses" }, label: `Responses that were not trained, by length: ${series.map((one) => `${sum(one.values)} ${one.name}`).join(", ")}` }), legend(series.map((one) => ({ ...one, isLine: false })))) : emptyNote("All finished responses were trained."),
        head: series.length && ["up to tokens", ...series.map((one) => one.name)], rows: () => to.map((upper, i) => [upper, ...series.map((one) => one.values[i])]) }),
    ];
  });
}

function anyMetric(runs, view, redraw) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(COLUMNS(run))))].filter((name) => name !== "step").sort();
  if (!names.length) return [emptyNote("This run has no metrics.jsonl yet.")];
  if (!names.includes(view.metric)) view.metric = names.includes("actor/pg_loss") ? "actor/pg_loss" : names[0];
  const select = h("select", { id: "metric", onchange: () => { view.metric = select.value; redraw("metrics"); } }, names.map((name) => h("option", { value: name, selected: name === view.metric }, name)));
  const log = h("input", { type: "checkbox", id: "log", checked: view.isLog || null, onchange: () => { view.isLog = log.checked; redraw("metrics"); } });
  return [
    h("div", { class: "tools wide" }, h("label", {}, "Metric", select), h("label", {}, log, "logarithmic")),
    metricFigure(runs, view, { title: view.metric, note: runs.map((run) => run.metrics.meanings[view.metric]).find(Boolean), names: [[view.metric, ""]], smooth: true, y: { log: view.isLog, label: "" }, wide: true }),
  ];
}

function settings(runs) {
  const keys = [...new Set(runs.flatMap((run) => Object.entries(run.config).flatMap(([section, own]) => flatKeys(section, own))))];
  if (!keys.length) return [emptyNote("The run has no config.toml.")];
  const valueOf = (run, key) => { const value = key.split(".").reduce((at, part) => at?.[part], run.config); return value === undefined ? "–" : typeof value === "string" ? value : JSON.stringify(value); };
  const rows = keys.map((key) => {
    const values = runs.map((run) => valueOf(run, key));
    const differs = new Set(values.filter((_, i) => Object.keys(runs[i].config).length)).size > 1;
    return h("tr", { class: differs ? "differs" : null }, h("td", {}, h("code", {}, key)), values.map((value) => h("td", { class: "text" }, value)));
  });
  return [figure({ title: "config.toml", wide: true, note: runs.length > 1 ? "Rows that differ are marked." : null, body: table(["key", ...runs.map((run) => run.label)], rows, "Settings of the runs", runs.map((_, i) => i + 1)) })];
}
function flatKeys(prefix, value) {
  if (value === null || typeof value !== "object" || Array.isArray(value)) return [prefix];
  return Object.entries(value).flatMap(([name, own]) => flatKeys(`${prefix}.${name}`, own));
}
