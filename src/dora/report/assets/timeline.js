// The timeline on a canvas: the trainer, and below it one lane for each row of each engine, coloured by version.

const TRAINER_HEIGHT = 22;
const GAP = 14;
const LOADS_HEIGHT = 5;
const MAX_ARROWS = 400;

class Timeline {
  constructor(run, view) {
    this.run = run;
    this.engines = run.engines;
    this.view = view; // {from, to, mode}: kept when the page is redrawn
    this.lanes = this.engines.tracks.map((track) => (track.spans ? assignLanes(track) : []));
    const [from, to] = [this.engines.from, this.engines.to];
    this.whole = [from, Math.max(to, from + 1)];
    if (view.isWhole === undefined) this.setInitialView();
    if (view.isWhole) [view.from, view.to] = this.whole;
    this.layOut();
  }

  // A view in which versions are distinguishable: the whole run, or twelve versions around a lost engine or a migration.
  setInitialView() {
    const { published, engines: { tracks, migrations } } = this.run;
    this.view.mode = "version";
    this.view.isWhole = published.length <= 40;
    if (this.view.isWhole) return;
    const lost = tracks.find((track) => track.end === "lost");
    const notable = lost ? newestAt(published, lost.to) : migrations.length ? newestAt(published, 1000 * migrations[migrations.length >> 1].t) : published.length >> 1;
    const middle = Math.max(6, Math.min(notable, published.length - 7));
    [this.view.from, this.view.to] = [published[middle - 6], published[middle + 6]];
  }

  layOut() {
    this.tops = [];
    let y = 18 + TRAINER_HEIGHT + GAP;
    this.engines.tracks.forEach((track, i) => {
      const many = this.engines.tracks.length;
      const num = Math.max(track.rows, 1 + Math.max(-1, ...this.lanes[i].map((span) => span.lane)));
      const lane = Math.max(2, Math.min(9, (many > 8 ? 32 : 96) / num));
      this.tops.push({ y: y + LOADS_HEIGHT + 2, lane, height: lane * num });
      y += LOADS_HEIGHT + 2 + lane * num + GAP;
    });
    this.height = y + 16;
  }

  element() {
    this.canvas = h("canvas", {
      id: `timeline-${this.run.index}`, tabindex: 0, role: "img", height: this.height, "aria-label": this.description(),
      "aria-keyshortcuts": "ArrowLeft ArrowRight + - Home",
    });
    this.map = h("canvas", { height: 46, "aria-hidden": "true" });
    this.span = h("span", {});
    const box = responsive((_, width) => { this.width = width; this.draw(); });
    box.append(this.canvas, h("div", { style: "height:.4rem" }), this.map);
    this.listen();
    return h("div", {}, this.tools(), box, this.legend());
  }

  description() {
    const { tracks, num_migrations, num_spans } = this.engines;
    const lost = tracks.filter((track) => track.end === "lost").length;
    return `Timeline of ${plural(tracks.length, "engine")}: ${plural(num_spans, "request span")}, ` +
      `${plural(num_migrations, "migration")}, ${plural(lost, "engine")} lost. The table below has the numbers of each engine.`;
  }

  tools() {
    const button = (text, name, act) => h("button", { type: "button", "aria-label": name, title: name, onclick: () => { act(); this.draw(); } }, text);
    const modes = [["version", "version"], ["age", "age (newest version − its version)"]];
    const select = h("select", { id: `colour-${this.run.index}`, onchange: () => { this.view.mode = select.value; this.draw(); this.key.replaceChildren(...this.entries()); } },
      modes.map(([value, name]) => h("option", { value, selected: this.view.mode === value }, name)));
    return h("div", { class: "tools" },
      h("label", {}, "Colour by", select),
      h("span", { class: "buttons" },
        button("◀", "Earlier", () => this.pan(-0.5)), button("▶", "Later", () => this.pan(0.5)),
        button("+", "Zoom in", () => this.zoom(0.5)), button("−", "Zoom out", () => this.zoom(2)),
        button("Whole run", "The whole run", () => this.show(...this.whole))),
      this.span);
  }

  entries() {
    const versions = HUES.map((colour, i) => ({ name: `v${i}, v${i + HUES.length}, …`, colour, isLine: false }));
    const bound = this.run.limits.max_staleness;
    const oldest = Math.max(bound, this.oldest());
    const ages = AGES.slice(0, oldest + 1).map((colour, age) => ({ name: age === 0 ? "newest version" : age === AGES.length - 1 && oldest > age ? `${age} or more versions older` : `${plural(age, "version")} older`, colour, isLine: false }));
    return legend(this.view.mode === "age" ? ages : versions).children;
  }

  legend() {
    this.key = h("ul", { class: "legend" }, [...this.entries()]);
    const trainer = [["trains", "var(--soft)"], ["publishes", "var(--line)"], ["waits", "var(--bad)"]].map(([name, colour]) => ({ name: `trainer ${name}`, colour, isLine: false, isHatched: name === "waits" }));
    const marks = ["empty: free row", "thin bar above an engine: weight load, in the colour of the version; red: failed", "arrow: migration", "✕ lost, or removed: end of an engine"];
    return h("div", {}, this.key, h("ul", { class: "legend" }, [...legend(trainer).children], marks.map((text) => h("li", {}, text))));
  }

  // The highest age of any span at its end.
  oldest() {
    const ages = this.lanes.flatMap((spans) => spans.map((span) => newestAt(this.run.published, span.to) - span.version));
    return ages.reduce((highest, age) => Math.max(highest, age), 0);
  }

  show(from, to) {
    const [low, high] = this.whole;
    const length = Math.max(5, Math.min(to - from, high - low));
    const start = Math.max(low, Math.min(from, high - length));
    Object.assign(this.view, { from: start, to: start + length, isWhole: length >= high - low });
  }
  pan(fraction) {
    const by = fraction * (this.view.to - this.view.from);
    this.show(this.view.from + by, this.view.to + by);
  }
  zoom(factor, at = (this.view.from + this.view.to) / 2) {
    this.show(at - (at - this.view.from) * factor, at + (this.view.to - at) * factor);
  }

  get left() { return 34; }
  x(time) { return this.left + ((time - this.view.from) / (this.view.to - this.view.from)) * (this.width - this.left); }
  time(x) { return this.view.from + ((x - this.left) / (this.width - this.left)) * (this.view.to - this.view.from); }

  listen() {
    let dragged = null;
    const canvas = this.canvas;
    canvas.addEventListener("pointerdown", (event) => { dragged = event.clientX; canvas.setPointerCapture(event.pointerId); });
    canvas.addEventListener("pointerup", () => { dragged = null; });
    canvas.addEventListener("pointercancel", () => { dragged = null; });
    canvas.addEventListener("pointermove", (event) => {
      if (dragged !== null) {
        this.pan((dragged - event.clientX) / (this.width - this.left));
        dragged = event.clientX;
        this.draw();
      }
      const box = canvas.getBoundingClientRect();
      const text = this.textAt(event.clientX - box.left, event.clientY - box.top);
      if (text) showTip(text, event.clientX, event.clientY); else hideTip();
    });
    canvas.addEventListener("pointerleave", hideTip);
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      this.zoom(event.deltaY > 0 ? 1.25 : 0.8, this.time(event.clientX - canvas.getBoundingClientRect().left));
      this.draw();
    }, { passive: false });
    canvas.addEventListener("dblclick", (event) => { this.zoom(0.4, this.time(event.clientX - canvas.getBoundingClientRect().left)); this.draw(); });
    canvas.addEventListener("keydown", (event) => {
      const act = { ArrowLeft: () => this.pan(-0.25), ArrowRight: () => this.pan(0.25), "+": () => this.zoom(0.5), "=": () => this.zoom(0.5),
        "-": () => this.zoom(2), Home: () => this.show(...this.whole) }[event.key];
      if (!act) return;
      event.preventDefault();
      act();
      this.draw();
      announce(`${seconds(this.view.from / 1000)} to ${seconds(this.view.to / 1000)}`);
    });
    const jump = (event) => {
      const fraction = (event.clientX - this.map.getBoundingClientRect().left - this.left) / (this.width - this.left);
      const [low, high] = this.whole;
      const middle = low + fraction * (high - low);
      const half = (this.view.to - this.view.from) / 2;
      this.show(middle - half, middle + half);
      this.draw();
    };
    this.map.addEventListener("pointerdown", (event) => { this.map.setPointerCapture(event.pointerId); jump(event); });
    this.map.addEventListener("pointermove", (event) => { if (event.buttons) jump(event); });
  }

  // The tooltip of a point.
  textAt(x, y) {
    const time = this.time(x);
    if (y >= 18 && y < 18 + TRAINER_HEIGHT) {
      const found = this.run.trainer.intervals.find(([, from, to]) => from <= time && time <= to);
      if (found) return `trainer\n${found[0] === "train" ? `trains step ${stepNumber(found[3])}` : `publishes version ${found[3]}`}: ${seconds((found[2] - found[1]) / 1000)}`;
      return "trainer\nwaits";
    }
    const index = this.tops.findIndex((top) => y >= top.y - LOADS_HEIGHT && y < top.y + top.height);
    if (index < 0) return null;
    const [track, top] = [this.engines.tracks[index], this.tops[index]];
    const load = y < top.y && track.loads.find(([from, to]) => from <= time && time <= to);
    if (load) return `engine ${track.engine}\nloads version ${load[2]}: ${load[1] - load[0]} ms, requests paused for ${load[3]} ms${load[4] ? `\nfailed: ${load[4]}` : ""}`;
    const lane = Math.floor((y - top.y) / top.lane);
    const span = this.lanes[index].find((one) => one.lane === lane && one.from <= time && time <= one.to);
    if (!span) return `engine ${track.engine}, ${seconds(time / 1000)}`;
    const age = newestAt(this.run.published, span.from) - span.version;
    return `request ${span.request} on engine ${track.engine}\nversion ${span.version}, ${age ? `${plural(age, "version")} older than the newest` : "the newest"} at its start\n` +
      `${seconds(span.from / 1000)} to ${seconds(span.to / 1000)}: ${seconds((span.to - span.from) / 1000)}`;
  }

  draw() {
    if (!this.width) return;
    this.ink = Object.fromEntries(["ink", "soft", "line", "hold", "bad", "page"].map((name) => [name, styled(`--${name}`)]));
    const pen = this.pen(this.canvas, this.height);
    this.span.textContent = `${seconds(this.view.from / 1000)} – ${seconds(this.view.to / 1000)}, of ${seconds((this.whole[1] - this.whole[0]) / 1000)}`;
    pen.font = "12px system-ui, sans-serif";
    pen.fillStyle = this.ink.soft;
    for (const tick of niceTicks(this.view.from / 1000, this.view.to / 1000, Math.max(4, Math.floor(this.width / 110)))) {
      const x = this.x(1000 * tick);
      if (x < this.left || x > this.width) continue;
      pen.fillRect(x, 14, 1, 4);
      pen.textAlign = x > this.width - 30 ? "right" : "center";
      pen.fillText(`${number(tick, 3)} s`, x, 11);
    }
    pen.textAlign = "left";
    pen.fillText("train", 0, 18 + TRAINER_HEIGHT / 2 + 4);
    this.engines.tracks.forEach((track, i) => pen.fillText(`E${track.engine}${track.attempt ? `·${track.attempt + 1}` : ""}`, 0, this.tops[i].y + Math.min(this.tops[i].height, 40) / 2 + 4));
    pen.save();
    pen.beginPath();
    pen.rect(this.left, 0, this.width - this.left, this.height);
    pen.clip();
    this.drawTrainer(pen);
    this.engines.tracks.forEach((track, i) => this.drawTrack(pen, track, i));
    this.drawMigrations(pen);
    pen.restore();
    this.drawMap();
  }

  pen(canvas, height) {
    const ratio = Math.min(3, devicePixelRatio || 1);
    canvas.width = Math.round(this.width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    return pen;
  }

  drawTrainer(pen) {
    pen.fillStyle = hatch(pen, this.ink.bad, this.ink.hold);
    const [from, to] = [this.x(this.whole[0]), this.x(this.whole[1])];
    pen.fillRect(Math.max(from, this.left), 18, Math.min(to, this.width) - Math.max(from, this.left), TRAINER_HEIGHT);
    for (const [phase, start, end, count] of this.run.trainer.intervals) {
      if (end < this.view.from || start > this.view.to) continue;
      const [a, b] = [this.x(start), this.x(end)];
      pen.fillStyle = phase === "train" ? this.ink.soft : this.ink.line;
      pen.fillRect(a, 18, Math.max(0.5, b - a - 0.5), TRAINER_HEIGHT);
      if (phase === "train" && b - a > 26) {
        pen.fillStyle = this.ink.page;
        pen.textAlign = "center";
        pen.fillText(`${stepNumber(count)}`, (a + b) / 2, 18 + TRAINER_HEIGHT / 2 + 4);
      }
    }
    pen.textAlign = "left";
  }

  drawTrack(pen, track, index) {
    const { y, lane, height } = this.tops[index];
    const [from, to] = [Math.max(this.left, this.x(track.from)), Math.min(this.width, this.x(track.to))];
    pen.fillStyle = this.ink.hold;
    if (to > from) pen.fillRect(from, y, to - from, height);
    else {
      pen.fillStyle = this.ink.soft;
      pen.fillText(track.to <= this.view.from ? `◂ ${track.end || "ended"} at ${number(track.to / 1000, 1)} s` : `joins at ${number(track.from / 1000, 1)} s ▸`, this.left + 6, y + Math.min(height, 40) / 2 + 4);
    }
    const thickness = lane >= 4 ? lane - 1 : lane;
    const paths = new Map(); // one for each colour: one fill of thousands of boxes is much faster
    for (const span of this.lanes[index]) {
      if (span.to < this.view.from || span.from > this.view.to) continue;
      for (const [start, end, colour] of this.pieces(span)) {
        if (!paths.has(colour)) paths.set(colour, new Path2D());
        const [a, b] = [this.x(start), this.x(end)];
        paths.get(colour).rect(a, y + span.lane * lane, Math.max(0.6, b - a - (b - a > 4 ? 1 : 0)), thickness);
      }
    }
    for (const [colour, path] of paths) {
      pen.fillStyle = colour;
      pen.fill(path);
    }
    if (track.bins) this.drawBins(pen, track, index);
    for (const [start, end, version, , failure] of track.loads) {
      if (end < this.view.from || start > this.view.to) continue;
      pen.fillStyle = failure ? this.ink.bad : this.colour(version, end);
      pen.fillRect(this.x(start), y - LOADS_HEIGHT - 1, Math.max(2, this.x(end) - this.x(start)), LOADS_HEIGHT);
    }
    if (track.end) {
      const x = this.x(track.to);
      pen.fillStyle = pen.strokeStyle = track.end === "lost" ? this.ink.bad : this.ink.soft;
      pen.lineWidth = 2;
      pen.fillRect(x - 1, y - LOADS_HEIGHT, 2, height + LOADS_HEIGHT);
      pen.font = "bold 14px system-ui, sans-serif";
      pen.textAlign = x > this.width - 60 ? "right" : "left";
      pen.fillText(track.end === "lost" ? "✕ lost" : "removed", x + (x > this.width - 60 ? -5 : 5), y + Math.min(height - 2, 14));
      pen.textAlign = "left";
      pen.font = "12px system-ui, sans-serif";
    }
  }

  // Occupied rows of a run with too many spans, stacked from the bottom of the track.
  drawBins(pen, track, index) {
    const { y, height } = this.tops[index];
    const floors = new Map();
    for (const [bin, version, rows] of track.bins) {
      const start = this.engines.from + bin * this.engines.bin_ms;
      const tall = (rows / track.rows) * height;
      const floor = floors.get(bin) || 0;
      floors.set(bin, floor + tall);
      if (start + this.engines.bin_ms < this.view.from || start > this.view.to) continue;
      pen.fillStyle = this.colour(version, start);
      pen.fillRect(this.x(start), y + height - floor - tall, Math.max(0.6, this.x(start + this.engines.bin_ms) - this.x(start)), tall);
    }
  }

  colour(version, time) {
    return this.view.mode === "age" ? ageColour(newestAt(this.run.published, time) - version) : versionColour(version);
  }

  // A span in one colour, or by age, in one colour for each version that was the newest during it.
  pieces(span) {
    if (this.view.mode !== "age") return [[span.from, span.to, versionColour(span.version)]];
    const published = this.run.published;
    const found = [];
    let start = span.from;
    for (let newest = newestAt(published, start); start < span.to; newest += 1) {
      const end = Math.min(span.to, published[newest + 1] ?? Infinity);
      found.push([start, end, ageColour(newest - span.version)]);
      start = end;
    }
    return found;
  }

  drawMigrations(pen) {
    const migrations = this.engines.migrations.filter(({ t, from, to }) => from !== null && to !== null && this.tops[from] && this.tops[to] &&
      1000 * t >= this.view.from && 1000 * t <= this.view.to);
    pen.strokeStyle = pen.fillStyle = this.ink.ink;
    pen.lineWidth = 1.5;
    for (const migration of migrations.slice(0, MAX_ARROWS)) {
      const [a, b] = [this.tops[migration.from], this.tops[migration.to]];
      const isDown = b.y > a.y;
      const x = this.x(1000 * migration.t);
      const [start, end] = isDown ? [a.y + a.height, b.y] : [a.y, b.y + b.height];
      const tip = isDown ? -6 : 6;
      pen.beginPath();
      pen.moveTo(x, start - (isDown ? 6 : -6));
      pen.lineTo(x, end);
      pen.stroke();
      pen.beginPath();
      pen.moveTo(x, end + (isDown ? 3 : -3));
      pen.lineTo(x - 4, end + tip);
      pen.lineTo(x + 4, end + tip);
      pen.fill();
    }
  }

  // The overview below: occupied rows over the whole run, and the part that is shown above.
  drawMap() {
    const height = 46;
    const pen = this.pen(this.map, height);
    const [low, high] = this.whole;
    const occupied = (this.occupied ||= this.occupancy(Math.min(400, this.width | 0)));
    pen.fillStyle = this.ink.hold;
    pen.fillRect(this.left, 0, this.width - this.left, height - 16);
    pen.fillStyle = HUES[4];
    const step = (this.width - this.left) / occupied.length;
    occupied.forEach((ratio, i) => pen.fillRect(this.left + i * step, (height - 16) * (1 - ratio), step + 0.5, (height - 16) * ratio));
    const place = (time) => this.left + ((time - low) / (high - low)) * (this.width - this.left);
    pen.strokeStyle = this.ink.ink;
    pen.lineWidth = 2;
    const width = Math.max(4, place(this.view.to) - place(this.view.from));
    pen.strokeRect(place(this.view.from) + 1, 1, width - 2, height - 18);
    pen.fillStyle = this.ink.soft;
    pen.font = "11px system-ui, sans-serif";
    const caption = this.width < 420 ? "occupied rows; drag to move" : "occupied rows over the whole run; drag to move";
    pen.fillText(caption, this.left, height - 4);
  }

  // Occupied over existing rows, in `num` bins of the whole run.
  occupancy(num) {
    const [low, high] = this.whole;
    const occupied = new Array(num).fill(0);
    const existing = new Array(num).fill(1e-9);
    const add = (into, from, to, weight) => {
      const [a, b] = [((from - low) / (high - low)) * num, ((to - low) / (high - low)) * num];
      for (let i = Math.max(0, Math.floor(a)); i < Math.min(num, Math.ceil(b)); i += 1) into[i] += weight * (Math.min(b, i + 1) - Math.max(a, i));
    };
    this.engines.tracks.forEach((track, i) => {
      add(existing, track.from, track.to, track.rows);
      this.lanes[i].forEach((span) => add(occupied, span.from, span.to, 1));
      (track.bins || []).forEach(([bin, , rows]) => add(occupied, this.engines.from + bin * this.engines.bin_ms, this.engines.from + (bin + 1) * this.engines.bin_ms, rows));
    });
    return occupied.map((value, i) => Math.min(1, value / existing[i]));
  }
}
