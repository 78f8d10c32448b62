// Puts the page together, and draws it anew when a live run has gone on.

const holder = document.getElementById("data");
const isLive = holder.dataset.live === "true";
const view = { axis: "step", timelines: {}, samples: {} };
let runs = [];

const SECTIONS = [
  ["learning", "Learning", "What the policy learnt, and from what.", learning],
  ["engines", "Engines", "Each lane is a row of an engine, each block the stay of one request, in the colour of the version that decoded it. Empty is idle.", engineSection],
  ["waiting", "Waiting", "Who waited for whom, and where the bubbles come from.", waiting],
  ["staleness", "Staleness", "How old samples were when they were trained.", stalenessSection],
  ["lengths", "Lengths", "Whether what is trained is as long as what is generated.", lengths],
  ["lost-groups", "Left out", "Groups that ended untrained, by reason and length.", lostGroups],
  ["phases", "Phases", "Where each step’s time went.", phases],
  ["mismatch", "Mismatch", "How far apart trainer and engines, and old and new policies, were.", mismatch],
  ["metrics", "Any metric", "Every name of metrics.jsonl.", (all) => anyMetric(all, view, drawSection)],
  ["samples", "Samples", "Prompts, answers, rewards, and the life of each request.", (all) =>
    all.map((run) => h("div", { class: "wide" }, all.length > 1 ? h("h3", {}, run.label) : null, sampleBrowser(run, (view.samples[run.index] ||= {}))))],
  ["settings", "Settings", "", settings],
];

function prepare(told) {
  const names = told.map((run) => run.name);
  return told.map((run, index) => {
    const isShared = names.filter((name) => name === run.name).length > 1;
    const label = isShared ? run.folder.split("/").slice(-3).join("/") : run.name;
    return { ...run, index, label, colour: runColour(index), dash: runDash(index) };
  });
}

// The figures that a reader looks for first; each is told for every run.
function glance() {
  const tell = (name, value, more = () => null) => {
    const values = runs.map((run) => [run, value(run), more(run)]);
    if (!values.some(([, text]) => text)) return null;
    return h("div", {}, h("dt", {}, name), values.map(([run, text, small]) =>
      h("dd", {}, runs.length > 1 ? swatch(run.colour, run.dash) : null, text || "–", small ? h("small", {}, small) : null)));
  };
  const last = (run, name) => { const values = known(COLUMNS(run)[name] || []); return values[values.length - 1]; };
  const evaluated = (run, name) => run.evaluations.filter((one) => isNumber(one[name]));
  const accuracy = (name) => (run) => { const told = evaluated(run, name); return told.length ? `${percent(told[0][name])} → ${percent(told[told.length - 1][name])}`.replaceAll(" ", "\u00a0") : null; };
  const spent = (run, pick) => sum(run.rows.flatMap((one) => Object.entries(one.spent).filter(([cause]) => pick(cause)).map(([, value]) => value)));
  const busy = (run) => spent(run, (cause) => cause === "decoding") / (spent(run, () => true) || NaN);
  const idle = (run) => { const { train, publish, answers, rewards, other } = run.trainer.sums; return (answers + rewards + other) / (train + publish + answers + rewards + other || NaN); };
  const aged = (run) => { const told = Object.entries(run.groups.staleness); const total = sum(told.map(([, num]) => num)); return total ? sum(told.map(([age, num]) => age * num)) / total : NaN; };
  const lost = (run) => run.engines.tracks.filter((track) => track.end === "lost").length;
  return h("dl", { class: runs.length > 1 ? "figures many" : "figures" },
    tell("Held-out accuracy, sampled", accuracy("pass@1")), tell("Held-out accuracy, greedy", accuracy("greedy_pass")),
    tell("Reward, last step", (run) => (isNumber(last(run, "reward/mean")) ? number(last(run, "reward/mean"), 3) : null)),
    tell("Steps trained", (run) => `${number(Math.floor(run.groups.ends.trained / run.limits.batch_size))} of ${number(run.limits.num_steps)}`, (run) => `in ${seconds(run.to_s - run.from_s)}`),
    tell("Trained tokens per second", (run) => { const rate = run.summary.tokens_per_s ?? last(run, "perf/throughput"); return isNumber(rate) ? number(rate, 0) : null; }),
    tell("Staleness, mean", (run) => (isNumber(aged(run)) ? number(aged(run), 2) : null), (run) => `bound ${run.limits.max_staleness}`),
    tell("Rows decoding", (run) => percent(busy(run)), (run) => `${plural(run.engines.num_tracks, "engine")}`),
    tell("Trainer waiting", (run) => percent(idle(run)), (run) => plural(run.trainer.num_waits, "wait")),
    tell("Versions alive, mean", (run) => (isNumber(run.summary.live_versions_mean) ? number(run.summary.live_versions_mean, 2) : null), (run) => (isNumber(run.summary.live_versions_max) ? `most ${run.summary.live_versions_max}` : null)),
    tell("Requests moved with KV", (run) => number(run.engines.num_moves), (run) => (isNumber(run.summary.reprefill_tokens) ? `${plural(run.summary.reprefill_tokens, "token")} re-prefilled` : null)),
    tell("Groups left out", (run) => number(run.groups.ends.filtered + run.groups.ends.failed), (run) => `${number(run.groups.ends.filtered)} filtered, ${number(run.groups.ends.failed)} failed`),
    tell("Engines lost", (run) => number(lost(run)), (run) => (isNumber(run.summary.regenerated_tokens) ? `${plural(run.summary.regenerated_tokens, "token")} generated again` : null)));
}

function runCard(run) {
  const { limits } = run;
  const names = { C1: "one version per answer", C2: "no group lost", C3: "staleness bounded" };
  const waived = (name) => name === "C1" && limits.breaks_c1;
  const verdicts = run.audit
    ? Object.entries(run.audit).map(([name, one]) => {
      const isWaived = waived(name) && one.is_kept;
      return h("li", { class: isWaived ? null : one.is_kept ? "kept" : "broken", title: one.text }, isWaived ? `– ${name} given up by this policy` : `${one.is_kept ? "✓" : "✕"} ${name} ${names[name]}`);
    })
    : [h("li", {}, "audit: ", h("code", {}, `dora audit ${run.folder}`))];
  const findings = run.audit ? Object.values(run.audit).flatMap((one) => one.findings) : [];
  const model = run.config.model?.path?.split("/").pop();
  const stopped = run.summary.stopped;
  return h("li", {},
    runs.length > 1 ? h("strong", {}, swatch(run.colour, run.dash), run.label) : null,
    h("p", {}, `${run.policy}, max_staleness ${limits.max_staleness}, ${limits.batch_size} groups of ${limits.group_size}${model ? `, ${model}` : ""}${run.config.data?.path ? ` on ${run.config.data.path.split("/").pop()}` : ""}`),
    isStarting(run) ? h("p", { class: "starting" }, "Starting: models load, and held-out prompts are answered first. What happens is shown from the first group on.") : null,
    h("ul", { class: "verdicts" }, verdicts, limits.breaks_c1 ? h("li", { title: "breaks_c1" }, "answers under way go on with newer weights, so one may be of several versions") : null),
    findings.map((finding) => h("p", { class: "warn" }, finding)),
    stopped ? h("p", { class: "warn" }, `Stopped early: ${stopped}`) : null,
    run.is_torn && !isLive ? h("p", { class: "warn" }, "The journal’s last line was cut off and is left out.") : null);
}

// Nothing is recorded yet: processes start, or the first policy is evaluated.
const isStarting = (run) => !run.has_begun && !run.is_over;

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
  forget(section);
  section.replaceChildren(h("h2", { id: `${id}-title` }, title), lead ? h("p", { class: "lead" }, lead) : "", id === "learning" ? axisTools() : "", h("div", { class: "grid" }, make(runs, view)));
  for (const one of section.querySelectorAll("details[data-key]")) if (open.has(one.dataset.key)) one.open = true;
  if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
}

function draw() {
  const first = document.getElementById("glance");
  const isEmpty = runs.every(isStarting);
  first.replaceChildren(
    h("h1", {}, runs.length === 1 ? runs[0].label : `${runs.length} runs side by side`),
    runs.length === 1 ? "" : h("p", { class: "subtitle" }, "A run has the same colour in every chart, and the dash shown here where it is one curve; of several curves the legend below tells the dashes."),
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
  const marked = new IntersectionObserver((entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => {
    for (const link of document.querySelectorAll("#nav a")) {
      if (link.hash === `#${entry.target.id}`) link.setAttribute("aria-current", "true"); else link.removeAttribute("aria-current");
    }
  }), { rootMargin: "-20% 0px -70% 0px" });
  SECTIONS.forEach(([id]) => marked.observe(document.getElementById(id)));
}

// A server of the page says when a run has gone on; what is new is asked for, never twice at once.
function follow() {
  const badge = document.getElementById("live");
  const show = (state, text) => { badge.hidden = false; badge.dataset.state = state; badge.textContent = text; };
  let isAsking = false;
  let isDue = false;
  const ask = async () => {
    if (isAsking) { isDue = true; return; }
    isAsking = true;
    try {
      const answer = await fetch("data");
      if (answer.ok) { runs = prepare(await answer.json()); draw(); if (badge.dataset.state === "live") going(); }
    } catch { /* the stream of events tells of a lost connection */ }
    isAsking = false;
    if (isDue) { isDue = false; ask(); }
  };
  const going = () => show("live", runs.every(isStarting) ? "● starting" : "● live");
  const events = new EventSource("events");
  events.addEventListener("open", going);
  events.addEventListener("error", () => show("lost", "connection lost, trying again"));
  events.addEventListener("change", () => { going(); ask(); });
  events.addEventListener("end", () => { show("ended", "ended"); ask(); });
  going();
}

runs = prepare(JSON.parse(holder.textContent));
build();
draw();
if (isLive) follow();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
