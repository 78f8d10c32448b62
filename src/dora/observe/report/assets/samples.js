// The browser of answers: some groups at a time are written into the page, and their answers once they are opened.

const PAGE = 15; // groups at a time

const ORDERS = {
  step: ["step, first to last", (a, b) => (a.step ?? Infinity) - (b.step ?? Infinity)],
  late: ["step, last to first", (a, b) => (b.step ?? -1) - (a.step ?? -1)],
  low: ["lowest mean reward", (a, b) => meanReward(a) - meanReward(b)],
  high: ["highest mean reward", (a, b) => meanReward(b) - meanReward(a)],
  long: ["longest answer", (a, b) => longest(b) - longest(a)],
  old: ["stalest when trained", (a, b) => staleness(b) - staleness(a)],
};
const KINDS = {
  "the trainer waited for it": "The trainer waited longest for these.",
  "moved between engines": "An answer of these went on at another engine, with its KV.",
  "longest answers": "The longest answers of the run.",
  "low reward, late": "Of the last tenth of the run, the lowest rewards.",
  "filtered": "Left out, for all rewards were equal.",
  "failed": "Left out, for an answer was refused or could not be judged.",
  "several versions": "An answer of these was begun by one version and went on with newer weights.",
};
const known = (values) => values.filter(isNumber);
const mean = (values) => (values.length ? sum(values) / values.length : NaN);
const meanReward = (group) => mean(known(group.answers.map((answer) => answer.reward))) || 0;
const longest = (group) => Math.max(...group.answers.map((answer) => answer.tokens));
const staleness = (group) => (group.step === null ? -1 : group.step - group.version);

// `view` keeps what was chosen while the page is drawn anew: {text, only, order, num}.
function sampleBrowser(run, view) {
  const { samples } = run;
  if (!samples.groups.length) return nothing("No answer is stored yet.");
  view.order ||= "step";
  const rewards = known(samples.groups.flatMap((group) => group.answers.map((answer) => answer.reward)));
  run.rewards = [Math.min(0, ...rewards), Math.max(1, ...rewards)];
  const list = h("div", {});
  const count = h("p", { class: "soft", role: "status" });
  const shown = samples.groups.reduce((total, group) => total + group.answers.length, 0);
  const kinds = [...new Set(samples.groups.flatMap((group) => group.kinds))];

  const render = () => {
    const wanted = (view.text || "").toLowerCase();
    const found = samples.groups
      .filter((group) => !view.only || group.kinds.includes(view.only))
      .filter((group) => !wanted || textOf(group).includes(wanted))
      .sort(ORDERS[view.order][1]);
    view.num = Math.max(PAGE, view.num || 0);
    list.replaceChildren(...found.slice(0, view.num).map((group) => groupOf(run, group)));
    count.textContent = [`${plural(found.length, "group")} of the ${samples.groups.length} on this page.`, KINDS[view.only]].filter(Boolean).join(" ");
    if (found.length > view.num) list.append(h("p", {}, h("button", { type: "button", onclick: more }, `Show ${PAGE} more`)));
  };
  // The first new group gets the focus that the button had.
  const more = () => {
    const before = view.num;
    view.num += PAGE;
    render();
    list.children[before]?.querySelector("summary")?.focus();
  };
  const search = h("input", { type: "search", id: `search-${run.index}`, value: view.text || null, placeholder: "text or group", oninput: () => { view.text = search.value; view.num = PAGE; render(); } });
  const choose = (name, key, options) => {
    const select = h("select", { id: `${key}-${run.index}`, onchange: () => { view[key] = select.value; view.num = PAGE; render(); } },
      options.map(([value, text]) => h("option", { value, selected: (view[key] || "") === value }, text)));
    return h("label", {}, name, select);
  };
  render();
  return h("div", {},
    h("p", { class: "soft" },
      `${number(shown)} of ${plural(samples.num, "answer")} are on this page, in ${plural(samples.groups.length, "whole group")}: ` +
      "those that stand out, and others spread evenly over the run. ",
      h("code", {}, "--samples N"), " takes more; ", h("code", {}, "dora why RUN GROUP"), " tells the life of any other.",
      samples.is_text ? "" : " No tokenizer was found, so token ids are shown."),
    h("div", { class: "tools" },
      h("label", {}, "Search", search),
      choose("Show", "only", [["", "all"], ...kinds.map((kind) => [kind, kind])]),
      choose("Order", "order", Object.entries(ORDERS).map(([value, [text]]) => [value, text]))),
    count, list);
}

function textOf(group) {
  group.text ||= [group.group, group.prompt, ...group.answers.flatMap((answer) => answer.parts.map(([text]) => text))].join("\n").toLowerCase();
  return group.text;
}

// One square for each sibling, the fuller the higher its reward was.
function rewardStrip(rewards, [low, high]) {
  const squares = rewards.slice(0, 32).map((reward, i) => {
    const full = (10 * (reward - low)) / (high - low);
    return [s("rect", { x: 11 * i, y: 0, width: 9, height: 10, class: "empty" }), s("rect", { x: 11 * i, y: 10 - full, width: 9, height: full, class: "full" })];
  });
  return s("svg", { class: "strip", width: 11 * Math.min(32, rewards.length), height: 10, "aria-hidden": "true" }, squares);
}

function groupOf(run, group) {
  const rewards = known(group.answers.map((answer) => answer.reward));
  const inside = h("div", { class: "inside" });
  const box = h("details", { class: "group", "data-key": `group:${run.index}:${group.group}` },
    h("summary", {},
      h("code", {}, group.group), h("span", {}, `version ${group.version}`),
      h("span", {}, group.step === null ? group.state : `trained in step ${nth(group.step)}, staleness ${staleness(group)}`),
      h("span", {}, rewards.length ? [rewardStrip(rewards, run.rewards), `reward ${number(mean(rewards), 3)}`] : "not judged"),
      h("span", { class: "soft" }, `up to ${plural(longest(group), "token")}`),
      group.kinds.map((kind) => h("span", { class: "tag" }, kind))),
    inside);
  box.addEventListener("toggle", () => {
    if (box.open && !inside.childElementCount) {
      inside.append(h("h4", {}, "Prompt"), h("pre", {}, group.prompt), h("h4", {}, "Answers"), ...group.answers.map((answer) => answerOf(group, answer)));
    }
  });
  return box;
}

function answerOf(group, answer) {
  const versions = answer.segments
    ? `versions ${answer.segments.map(([version, tokens]) => `${version} (${plural(tokens, "token")})`).join(", ")}`
    : `version ${answer.version}`;
  const facts = [
    `reward ${number(answer.reward, 3)}`, answer.advantage === null ? null : `advantage ${number(answer.advantage, 3)}`,
    plural(answer.tokens, "token"), versions,
  ].filter(Boolean).join(" · ");
  const colour = versionColour(answer.version);
  return h("div", { class: "answer", style: `border-color:${colour}` },
    h("p", {}, h("b", {}, `${group.group}/${answer.sibling}`), ` · ${facts}`),
    h("pre", {}, answer.parts.map(([text, isDrawn]) => (isDrawn ? text : h("span", { class: "read", title: "read, not drawn by the model" }, text)))),
    h("details", {}, h("summary", {}, "Its life"),
      h("ol", {}, answer.life.map(([t, text]) => h("li", {}, h("span", {}, `${t.toFixed(3)} s`), text)))));
}
