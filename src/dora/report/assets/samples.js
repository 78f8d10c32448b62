// The sample browser: a page of groups at a time; the texts of a group are inserted when it is opened.

const PAGE_SIZE = 15; // groups

const ORDERS = {
  step: ["step, first to last", (a, b) => (a.step ?? Infinity) - (b.step ?? Infinity)],
  late: ["step, last to first", (a, b) => (b.step ?? -1) - (a.step ?? -1)],
  low: ["lowest mean reward", (a, b) => meanReward(a) - meanReward(b)],
  high: ["highest mean reward", (a, b) => meanReward(b) - meanReward(a)],
  long: ["longest response", (a, b) => longest(b) - longest(a)],
  stale: ["highest staleness", (a, b) => staleness(b) - staleness(a)],
};
const TAGS = {
  "trainer waited": "The trainer waited longest for these groups.",
  "migrated": "A response migrated to another engine with its KV.",
  "longest": "The longest responses of the run.",
  "low reward, late": "The lowest rewards in the last tenth of the run.",
  "filtered": "Filtered: all rewards of the group are equal.",
  "failed": "Failed: a response was rejected or could not be scored.",
  "several versions": "A response was started by one version and continued with newer weights.",
};
const known = (values) => values.filter(isNumber);
const mean = (values) => (values.length ? sum(values) / values.length : NaN);
const meanReward = (group) => mean(known(group.responses.map((response) => response.reward))) || 0;
const longest = (group) => Math.max(...group.responses.map((response) => response.tokens));
const staleness = (group) => (group.step === null ? -1 : group.step - group.version);

// `view` keeps the user's choices when the page is redrawn: {text, only, order, num}.
function sampleBrowser(run, view) {
  const { samples } = run;
  if (!samples.groups.length) return emptyNote("No responses are stored yet.");
  view.order ||= "step";
  const rewards = known(samples.groups.flatMap((group) => group.responses.map((response) => response.reward)));
  run.rewardRange = [Math.min(0, ...rewards), Math.max(1, ...rewards)];
  const list = h("div", {});
  const count = h("p", { class: "secondary", role: "status" });
  const numShown = samples.groups.reduce((total, group) => total + group.responses.length, 0);
  const tags = [...new Set(samples.groups.flatMap((group) => group.tags))];

  const render = () => {
    const wanted = (view.text || "").toLowerCase();
    const found = samples.groups
      .filter((group) => !view.only || group.tags.includes(view.only))
      .filter((group) => !wanted || searchText(group).includes(wanted))
      .sort(ORDERS[view.order][1]);
    view.num = Math.max(PAGE_SIZE, view.num || 0);
    list.replaceChildren(...found.slice(0, view.num).map((group) => groupElement(run, group)));
    count.textContent = [`${plural(found.length, "group")} of the ${samples.groups.length} on this page.`, TAGS[view.only]].filter(Boolean).join(" ");
    if (found.length > view.num) list.append(h("p", {}, h("button", { type: "button", onclick: showMore }, `Show ${PAGE_SIZE} more`)));
  };
  // The focus moves from the button to the first new group.
  const showMore = () => {
    const before = view.num;
    view.num += PAGE_SIZE;
    render();
    list.children[before]?.querySelector("summary")?.focus();
  };
  const search = h("input", { type: "search", id: `search-${run.index}`, value: view.text || null, placeholder: "text or group", oninput: () => { view.text = search.value; view.num = PAGE_SIZE; render(); } });
  const choice = (name, key, options) => {
    const select = h("select", { id: `${key}-${run.index}`, onchange: () => { view[key] = select.value; view.num = PAGE_SIZE; render(); } },
      options.map(([value, text]) => h("option", { value, selected: (view[key] || "") === value }, text)));
    return h("label", {}, name, select);
  };
  render();
  return h("div", {},
    h("p", { class: "secondary" },
      `This page has ${number(numShown)} of ${plural(samples.num, "response")}, in ${plural(samples.groups.length, "whole group")}: ` +
      "notable ones, and others spread evenly over the run. Option ",
      h("code", {}, "--samples N"), " changes the number; ", h("code", {}, "dora why RUN GROUP"), " prints the history of any group.",
      samples.is_text ? "" : " No tokenizer was found, so token ids are shown."),
    h("div", { class: "tools" },
      h("label", {}, "Search", search),
      choice("Show", "only", [["", "all"], ...tags.map((tag) => [tag, tag])]),
      choice("Order", "order", Object.entries(ORDERS).map(([value, [text]]) => [value, text]))),
    count, list);
}

function searchText(group) {
  group.text ||= [group.group, ...group.prompt.map(([, text]) => text), ...group.responses.flatMap((response) => response.parts.map(([text]) => text))].join("\n").toLowerCase();
  return group.text;
}

// One square for each sibling, filled in proportion to its reward.
function rewardStrip(rewards, [low, high]) {
  const squares = rewards.slice(0, 32).map((reward, i) => {
    const full = (10 * (reward - low)) / (high - low);
    return [s("rect", { x: 11 * i, y: 0, width: 9, height: 10, class: "empty" }), s("rect", { x: 11 * i, y: 10 - full, width: 9, height: full, class: "full" })];
  });
  return s("svg", { class: "strip", width: 11 * Math.min(32, rewards.length), height: 10, "aria-hidden": "true" }, squares);
}

function groupElement(run, group) {
  const rewards = known(group.responses.map((response) => response.reward));
  const inside = h("div", { class: "inside" });
  const box = h("details", { class: "group", "data-key": `group:${run.index}:${group.group}` },
    h("summary", {},
      h("code", {}, group.group), h("span", {}, `version ${group.version}`),
      h("span", {}, group.step === null ? group.state : `trained in step ${stepNumber(group.step)}, staleness ${staleness(group)}`),
      h("span", {}, rewards.length ? [rewardStrip(rewards, run.rewardRange), `reward ${number(mean(rewards), 3)}`] : "not scored"),
      h("span", { class: "secondary" }, `up to ${plural(longest(group), "token")}`),
      group.tags.map((tag) => h("span", { class: "tag" }, tag))),
    inside);
  box.addEventListener("toggle", () => {
    if (box.open && !inside.childElementCount) {
      inside.append(h("h4", {}, "Prompt"), ...group.prompt.map(turnElement), h("h4", {}, "Responses"), ...group.responses.map((response) => responseElement(group, response)));
    }
  });
  return box;
}

// A turn of a conversation with its role; text that is no conversation has none.
const turnElement = ([role, text]) => h("div", { class: "turn" }, role ? h("h5", {}, role) : null, h("pre", {}, text));

function responseElement(group, response) {
  const versions = response.segments
    ? `versions ${response.segments.map(([version, tokens]) => `${version} (${plural(tokens, "token")})`).join(", ")}`
    : `version ${response.version}`;
  const figures = [
    `reward ${number(response.reward, 3)}`, response.advantage === null ? null : `advantage ${number(response.advantage, 3)}`,
    response.turn_rewards && `rewards of turns ${response.turn_rewards.map((reward) => number(reward, 3)).join(", ")}`,
    plural(response.tokens, "token"), ["length", "max_turns", "observation_length"].includes(response.finish_reason) ? `cut (${response.finish_reason})` : null, versions,
  ].filter(Boolean).join(" · ");
  const colour = versionColour(response.version);
  const branchLabels = new Map((response.branches || []).map((branch) => [branch.turn, `\n[branch: follows ${plural(branch.num_tokens, "token")}, up to "${branch.follows.trim()}"]\n`]));
  return h("div", { class: "response", style: `border-color:${colour}` },
    h("p", {}, h("b", {}, `${group.group}/${response.sibling}`), ` · ${figures}`),
    h("pre", {}, response.parts.map(([text, isSampled], i) => [branchLabels.get(i), isSampled ? text : h("span", { class: "inserted", title: "inserted by the environment, not sampled" }, text)])),
    h("details", {}, h("summary", {}, "History"),
      h("ol", {}, response.history.map(([t, text]) => h("li", {}, h("span", {}, `${t.toFixed(3)} s`), text)))));
}
