// Build the page, and redraw it when a live run has new data.

const holder = document.getElementById("data");
const isLive = holder.dataset.live === "true";
const view = { axis: "step", timelines: {}, samples: {} };
let runs = [];

const SECTIONS = [
  ["learning", "Learning", "Rewards in training and on held-out prompts.", learning],
  ["engines", "Engines", "A lane is a row of an engine. A block is a request in the colour of the version that decodes it. An empty lane is a free row.", engineSection],
  ["idle-time", "Idle time", "What the trainer and the rows of the engines waited for.", idleTime],
  ["staleness", "Staleness", "Age of the samples when they were trained.", stalenessSection],
  ["lengths", "Response lengths", "Lengths of generated and of trained responses.", lengths],
  ["outcomes", "Group outcomes", "Groups that were not trained, by reason and length.", groupOutcomes],
  ["timing", "Step timing", "Where the time of each step went.", stepTiming],
  ["mismatch", "Mismatch", "Differences between trainer and engines, and between new and old policies.", mismatch],
  ["metrics", "All metrics", "Every name in metrics.jsonl.", (all) => anyMetric(all, view, drawSection)],
  ["samples", "Samples", "Prompts, responses, rewards, and the history of each request.", (all) =>
    all.map((run) => h("div", { class: "wide" }, all.length > 1 ? h("h3", {}, run.label) : null, sampleBrowser(run, (view.samples[run.index] ||= {}))))],
  ["settings", "Settings", "", settings],
];

function prepare(data) {
  const names = data.map((run) => run.name);
  return data.map((run, index) => {
    const isShared = names.filter((name) => name === run.name).length > 1;
    const label = isShared ? run.folder.split("/").slice(-3).join("/") : run.name;
    return { ...run, index, label, colour: runColour(index), dash: runDash(index) };
  });
}

// The most important figures, for every run.
function glance() {
  const entry = (name, value, more = () => null) => {
    const values = runs.map((run) => [run, value(run), more(run)]);
    if (!values.some(([, text]) => text)) return null;
    return h("div", {}, h("dt", {}, name), values.map(([run, text, small]) =>
      h("dd", {}, runs.length > 1 ? swatch(run.colour, run.dash) : null, text || "–", small ? h("small", {}, small) : null)));
  };
  const last = (run, name) => { const values = known(COLUMNS(run)[name] || []); return values[values.length - 1]; };
  const meanByTime = (run, name) => {
    const values = COLUMNS(run)[name] || [], spent = COLUMNS(run)["timing_s/step"] || [];
    const measured = values.map((value, i) => [value, spent[i]]).filter((pair) => pair.every(isNumber));
    return sum(measured.map(([value, time]) => value * time)) / (sum(measured.map(([, time]) => time)) || NaN);
  };
  const evaluated = (run, name) => run.evaluations.filter((one) => isNumber(one[name]));
  const score = isAccuracy(runs) ? percent : (value) => number(value, 3);
  const heldOut = ([name, word]) => entry(`Held-out ${scoreName(runs)}, ${word}`, (run) => { const found = scoresOf(evaluated(run, name), name, score); return [found[0], ...found.slice(1).slice(-1)].filter(Boolean).join(" → ").replaceAll(" ", "\u00a0"); });
  // The summary's; before there is one, the mean over the steps so far.
  const utilisation = (run) => run.summary.rollout_utilization ?? meanByTime(run, "rollout/utilization");
  const idleRatio = (run) => { const { train, publish, generation, scoring, other } = run.trainer.sums; return (generation + scoring + other) / (train + publish + generation + scoring + other || NaN); };
  const meanStaleness = (run) => { const found = Object.entries(run.groups.staleness); const total = sum(found.map(([, num]) => num)); return total ? sum(found.map(([age, num]) => age * num)) / total : NaN; };
  const numLost = (run) => run.engines.tracks.filter((track) => track.end === "lost").length;
  return h("dl", { class: runs.length > 1 ? "figures many" : "figures" },
    HELD_OUT_SCORES(runs).map(heldOut),
    entry("Reward, last step", (run) => (isNumber(last(run, "reward/mean")) ? number(last(run, "reward/mean"), 3) : null)),
    entry("Steps trained", (run) => `${number(Math.floor(run.groups.outcomes.trained / run.limits.batch_size))} of ${number(run.limits.num_steps)}`, (run) => `in ${seconds(run.to_s - run.from_s)}`),
    entry("Trained tokens per second", (run) => { const rate = run.summary.tokens_per_s ?? last(run, "perf/throughput"); return isNumber(rate) ? number(rate, 0) : null; }),
    entry("Staleness, mean", (run) => (isNumber(meanStaleness(run)) ? number(meanStaleness(run), 2) : null), (run) => `bound ${run.limits.max_staleness}`),
    entry("Rollout utilisation", (run) => (isNumber(utilisation(run)) ? percent(utilisation(run)) : null), (run) => `rows decoding, ${plural(run.engines.num_tracks, "engine")}`),
    entry("Trainer idle", (run) => percent(run.summary.trainer_idle_ratio ?? idleRatio(run)), (run) => plural(run.trainer.num_waits, "wait")),
    entry("Live versions, mean", (run) => (isNumber(run.summary.live_versions_mean) ? number(run.summary.live_versions_mean, 2) : null), (run) => (isNumber(run.summary.live_versions_max) ? `maximum ${run.summary.live_versions_max}` : null)),
    entry("Requests migrated", (run) => number(run.engines.num_migrations), (run) => (isNumber(run.summary.reprefill_tokens) ? `${plural(run.summary.reprefill_tokens, "token")} re-prefilled` : null)),
    entry("Groups not trained", (run) => number(run.groups.outcomes.filtered + run.groups.outcomes.failed), (run) => `${number(run.groups.outcomes.filtered)} filtered, ${number(run.groups.outcomes.failed)} failed`),
    entry("Engines lost", (run) => number(numLost(run)), (run) => (isNumber(run.summary.regenerated_tokens) ? `${plural(run.summary.regenerated_tokens, "token")} regenerated` : null)));
}

function runCard(run) {
  const { limits } = run;
  const names = { C1: "one version per response", C2: "no group lost", C3: "staleness bounded" };
  const verdicts = run.audit
    ? Object.entries(run.audit).map(([name, one]) => {
      const isWaived = name === "C1" && limits.breaks_c1 && one.is_kept;
      return h("li", { class: isWaived ? null : one.is_kept ? "kept" : "violated", title: one.text }, isWaived ? `– ${name} waived by the update policy` : `${one.is_kept ? "✓" : "✕"} ${name} ${names[name]}`);
    })
    : [h("li", {}, "audit: ", h("code", {}, `dora audit ${run.folder}`))];
  const findings = run.audit ? Object.values(run.audit).flatMap((one) => one.findings) : [];
  const model = run.config.model?.path?.split("/").pop();
  const stopped = run.summary.stopped;
  return h("li", {},
    runs.length > 1 ? h("strong", {}, swatch(run.colour, run.dash), run.label) : null,
    h("p", {}, `${run.policy}, max_staleness ${limits.max_staleness}, ${limits.batch_size} groups of ${limits.group_size}${model ? `, ${model}` : ""}${run.config.data?.path ? ` on ${run.config.data.path.split("/").pop()}` : ""}`),
    isStarting(run) ? h("p", { class: "starting" }, "Starting: the processes load the model and evaluate the initial policy. Charts appear with the first group.") : null,
    h("ul", { class: "verdicts" }, verdicts, limits.breaks_c1 ? h("li", { title: "breaks_c1" }, "a response may be of several versions: it continues with newer weights") : null),
    findings.map((finding) => h("p", { class: "warn" }, finding)),
    stopped ? h("p", { class: "warn" }, `Stopped early: ${stopped}`) : null,
    run.is_torn && !isLive ? h("p", { class: "warn" }, "The last line of the journal was cut off and is omitted.") : null);
}

// Nothing is recorded yet: processes start, or the initial policy is evaluated.
const isStarting = (run) => !run.is_started && !run.is_finished;

function axisTools() {
  const names = { step: "steps", time: "time", samples: "samples" };
  return h("div", { class: "tools", role: "group", "aria-label": "Horizontal axis of curves" }, "Curves over",
    h("span", { class: "buttons" }, Object.entries(names).map(([axis, name]) =>
      h("button", { type: "button", id: `axis-${axis}`, "aria-pressed": `${view.axis === axis}`, onclick: () => { view.axis = axis; draw(); } }, name))));
}

function drawSection(id) {
  const section = document.getElementById(id);
  const [, title, lead, make] = SECTIONS.find(([name]) => name === id);
  const open = new Set([...section.querySelectorAll("details[open][data-key]")].map((one) => one.dataset.key));
  const focused = section.contains(document.activeElement) ? document.activeElement.id : null;
  disposeCharts(section);
  section.replaceChildren(h("h2", { id: `${id}-title` }, title), lead ? h("p", { class: "lead" }, lead) : "", id === "learning" ? axisTools() : "", h("div", { class: "grid" }, make(runs, view)));
  for (const one of section.querySelectorAll("details[data-key]")) if (open.has(one.dataset.key)) one.open = true;
  if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
}

function draw() {
  const first = document.getElementById("glance");
  const isEmpty = runs.every(isStarting);
  first.replaceChildren(
    h("h1", {}, runs.length === 1 ? runs[0].label : `${runs.length} runs side by side`),
    runs.length === 1 ? "" : h("p", { class: "subtitle" }, "A run has the same colour in every chart. With one curve per run its dash is the one shown here; with several, the legend of the chart has the dashes."),
    h("ul", { class: "runs" }, runs.map(runCard)), isEmpty ? "" : glance());
  document.getElementById("nav").hidden = isEmpty;
  for (const [id] of SECTIONS) {
    document.getElementById(id).hidden = isEmpty && id !== "settings";
    if (!isTyping(document.getElementById(id))) drawSection(id);
  }
  document.body.dataset.ready = "true";
}
const isTyping = (section) => section.contains(document.activeElement) && document.activeElement.matches("input[type=search], select");

function build() {
  const main = document.getElementById("main");
  main.replaceChildren(h("section", { id: "glance", style: "margin-top:0", "aria-label": "At a glance" }),
    ...SECTIONS.map(([id]) => h("section", { id, "aria-labelledby": `${id}-title` })));
  document.getElementById("nav").append(...SECTIONS.map(([id, title]) => h("li", {}, h("a", { href: `#${id}` }, title))));
  const observer = new IntersectionObserver((entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => {
    for (const link of document.querySelectorAll("#nav a")) {
      if (link.hash === `#${entry.target.id}`) link.setAttribute("aria-current", "true"); else link.removeAttribute("aria-current");
    }
  }), { rootMargin: "-20% 0px -70% 0px" });
  SECTIONS.forEach(([id]) => observer.observe(document.getElementById(id)));
}

// The server sends an event when a run has new data; the page then fetches it, one request at a time.
function follow() {
  const badge = document.getElementById("live");
  const show = (state, text) => { badge.hidden = false; badge.dataset.state = state; badge.textContent = text; };
  let isFetching = false;
  let isDue = false;
  const refresh = async () => {
    if (isFetching) { isDue = true; return; }
    isFetching = true;
    try {
      const response = await fetch("data");
      if (response.ok) { runs = prepare(await response.json()); draw(); if (badge.dataset.state === "live") showLive(); }
    } catch { /* the event stream reports a lost connection */ }
    isFetching = false;
    if (isDue) { isDue = false; refresh(); }
  };
  const showLive = () => show("live", runs.every(isStarting) ? "● starting" : "● live");
  const events = new EventSource("events");
  events.addEventListener("open", showLive);
  events.addEventListener("error", () => show("lost", "connection lost, retrying"));
  events.addEventListener("change", () => { showLive(); refresh(); });
  events.addEventListener("end", () => { show("ended", "ended"); refresh(); });
  showLive();
}

runs = prepare(JSON.parse(holder.textContent));
build();
draw();
if (isLive) follow();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
