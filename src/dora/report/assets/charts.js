// SVG charts: lines, bars, stacked areas and stacked bars. Arrow keys announce them point by point.

const HEIGHT = 220;

// Means of neighbours: at most `maxPoints` points.
function binMeans(values, maxPoints) {
  const size = Math.ceil(values.length / maxPoints) || 1;
  return Array.from({ length: Math.ceil(values.length / size) }, (_, i) => {
    const own = values.slice(i * size, (i + 1) * size).filter(isNumber);
    return own.length ? sum(own) / own.length : null;
  });
}

function niceTicks(low, high, count) {
  const raw = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw || 1));
  const step = power * ([1, 2, 2.5, 5, 10].find((factor) => power * factor >= raw) || 10);
  const ticks = [];
  for (let tick = Math.ceil(low / step - 1e-9) * step; tick <= high + step * 1e-6; tick += step) {
    ticks.push(Math.abs(tick) < step * 1e-9 ? 0 : tick);
  }
  return ticks;
}
function logTicks(low, high) {
  const ticks = [];
  const every = Math.max(1, Math.ceil((Math.log10(high) - Math.log10(low)) / 5));
  for (let power = Math.ceil(Math.log10(low) - 1e-9); power <= Math.log10(high) + 1e-9; power += every) ticks.push(10 ** power);
  return ticks;
}
function shortNumber(value) {
  const size = Math.abs(value);
  if (size >= 1e6) return `${number(value / 1e6, 1)}M`;
  if (size >= 1e4) return `${number(value / 1e3, 1)}k`;
  if (size !== 0 && size < 1e-3) return value.toExponential(0);
  return number(value, 4);
}

// A scale from data to pixels, with ticks.
function scale(low, high, from, to, { log = false, count = 5 } = {}) {
  const place = log ? Math.log10 : (value) => value;
  const [a, b] = [place(low), place(high)];
  const at = (value) => from + ((place(value) - a) / (b - a || 1)) * (to - from);
  return Object.assign(at, { ticks: log ? logTicks(low, high) : niceTicks(low, high, count), low, high });
}
function extent(values, log) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (!isNumber(value) || (log && value <= 0)) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low > high) return log ? [0.1, 1] : [0, 1];
  if (low === 0 && high === 0) return [0, 1];
  if (low === high) return log ? [low / 2, high * 2] : [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
  return [low, high];
}

function frame(width, height, xs, ys, xLabel, yLabel, label) {
  const plot = s("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", tabindex: 0, "aria-label": label });
  const [left, right] = [xs(xs.low), xs(xs.high)];
  for (const tick of ys.ticks) {
    plot.append(
      s("line", { class: "gridline", x1: left, x2: right, y1: ys(tick), y2: ys(tick) }),
      s("text", { class: "axis", x: left - 6, y: ys(tick) + 4, "text-anchor": "end" }, shortNumber(tick)));
  }
  for (const tick of xs.ticks || []) {
    plot.append(s("text", { class: "axis", x: xs(tick), y: height - 22, "text-anchor": "middle" }, shortNumber(tick)));
  }
  plot.append(
    s("line", { class: "baseline", x1: left, x2: right, y1: ys(ys.low), y2: ys(ys.low) }),
    s("text", { class: "axis", x: (left + right) / 2, y: height - 4, "text-anchor": "middle" }, xLabel),
    s("text", { class: "axis", x: 0, y: 10 }, yLabel));
  return plot;
}

// Pointer and arrow keys move one cursor over `places` (pixels); `describe(index)` returns the text there.
function cursor(plot, places, top, bottom, describe) {
  if (!places.length) return;
  const line = s("line", { class: "cursor", y1: top, y2: bottom, visibility: "hidden" });
  plot.append(line);
  let index = -1;
  const move = (next, x, y) => {
    index = Math.max(0, Math.min(next, places.length - 1));
    line.setAttribute("x1", places[index]);
    line.setAttribute("x2", places[index]);
    line.setAttribute("visibility", "visible");
    const text = describe(index);
    const box = plot.getBoundingClientRect();
    showTip(text, x ?? box.left + places[index], y ?? box.top + top);
    return text;
  };
  const leave = () => { line.setAttribute("visibility", "hidden"); hideTip(); };
  plot.addEventListener("pointermove", (event) => {
    const x = event.clientX - plot.getBoundingClientRect().left;
    let best = 0;
    places.forEach((place, i) => { if (Math.abs(place - x) < Math.abs(places[best] - x)) best = i; });
    move(best, event.clientX, event.clientY);
  });
  plot.addEventListener("pointerleave", leave);
  plot.addEventListener("blur", leave);
  plot.addEventListener("keydown", (event) => {
    const stride = event.shiftKey ? 10 : 1;
    const next = { ArrowRight: index + stride, ArrowLeft: index - stride, Home: 0, End: places.length - 1 }[event.key];
    if (event.key === "Escape") leave();
    if (next === undefined) return;
    event.preventDefault();
    announce(move(next));
  });
}

// series: {name, colour, dash, x, y, low, high, isFaint, hasDots}; all x ascending.
function lineChart({ series, x, y, refs = [], label }) {
  return responsive((box, width) => {
    const [top, bottom, left, right] = [20, HEIGHT - 38, 50, width - 10];
    const [xLow, xHigh] = extent(series.flatMap((one) => one.x));
    let [yLow, yHigh] = extent([...series.flatMap((one) => [...one.y, ...(one.low || []), ...(one.high || [])]), ...refs.map((ref) => ref.y)], y.log);
    if (y.log) yLow = logFloor(series, yLow);
    else {
      const room = (yHigh - yLow) * 0.06;
      yLow = isNumber(y.low) ? y.low : yLow < 0 || yLow - room > 0 ? yLow - room : 0;
      yHigh = isNumber(y.high) ? Math.max(y.high, yHigh) : yHigh + room;
    }
    const xs = scale(xLow, xHigh, left, right, { count: Math.max(2, Math.floor(width / 110)) });
    const ys = scale(yLow, yHigh, bottom, top, { log: y.log, count: 4 });
    const plot = frame(width, HEIGHT, xs, ys, x.label, y.label, label);
    for (const ref of refs) {
      plot.append(s("line", { class: "refline", x1: left, x2: right, y1: ys(ref.y), y2: ys(ref.y) }),
        s("text", { class: "reftext", x: right, y: ys(ref.y) - 5, "text-anchor": "end" }, ref.text));
    }
    for (const one of series) plot.append(...drawLine(one, xs, ys, y.log));
    const described = series.filter((one) => !one.isFaint);
    const places = [...new Set(described.flatMap((one) => one.x))].filter(isNumber).sort((a, b) => a - b);
    cursor(plot, places.map(xs), top, bottom, (index) => {
      const at = places[index];
      const lines = described.map((one) => [one, one.x.indexOf(at)]).filter(([, i]) => i >= 0)
        .map(([one, i]) => `${one.name}: ${number(one.y[i], 5)}`);
      return [`${x.label} ${number(at, 2)}`, ...lines].join("\n");
    });
    box.replaceChildren(plot);
  });
}

// The lowest 2 % of the values are drawn at the floor: near 0 they would squeeze all others.
function logFloor(series, low) {
  const values = series.flatMap((one) => one.y).filter((value) => isNumber(value) && value > 0).sort((a, b) => a - b);
  return values.length ? Math.max(low, values[Math.floor(values.length / 50)] / 2) : low;
}

function drawLine(one, xs, linear, log) {
  const drawn = [];
  const usable = (value) => isNumber(value) && (!log || value > 0);
  const ys = log ? (value) => linear(Math.max(value, linear.low)) : linear;
  if (one.low) {
    const there = one.x.map((_, i) => i).filter((i) => usable(one.low[i]) && usable(one.high[i]));
    const upper = there.map((i) => `${xs(one.x[i])},${ys(one.high[i])}`);
    const lower = there.reverse().map((i) => `${xs(one.x[i])},${ys(one.low[i])}`);
    drawn.push(s("polygon", { points: [...upper, ...lower].join(" "), fill: one.colour, opacity: 0.16 }));
  }
  let path = "";
  let isPen = false;
  one.x.forEach((x, i) => {
    if (!usable(one.y[i]) || !isNumber(x)) { isPen = false; return; }
    path += `${isPen ? "L" : "M"}${xs(x).toFixed(1)},${ys(one.y[i]).toFixed(1)}`;
    isPen = true;
  });
  drawn.push(s("path", {
    d: path, fill: "none", stroke: one.colour, "stroke-width": one.isFaint ? 1 : 2, class: one.isFaint ? "faint" : "",
    "stroke-dasharray": one.isFaint ? "" : one.dash, "stroke-linejoin": "round",
  }));
  if (one.hasDots || one.x.length === 1) {
    one.x.forEach((x, i) => { if (usable(one.y[i])) drawn.push(s("circle", { cx: xs(x), cy: ys(one.y[i]), r: 3.5, fill: one.colour })); });
  }
  return drawn;
}

// Exponential moving mean.
function smoothed(values) {
  const weight = Math.max(0.06, Math.min(1, 12 / values.length));
  let mean = null;
  return values.map((value) => {
    if (!isNumber(value)) return mean;
    mean = mean === null ? value : mean + weight * (value - mean);
    return mean;
  });
}

// names: categories; series: {name, colour, values}; mark: {after, text} draws a line after a category.
function barChart({ names, series, x, y, mark, label }) {
  return responsive((box, width) => {
    const [top, bottom, left, right] = [20, HEIGHT - 38, 50, width - 10];
    const ys = scale(0, extent([0, ...series.flatMap((one) => one.values)])[1] * 1.08, bottom, top, { count: 4 });
    const xs = Object.assign((index) => left + (index / names.length) * (right - left), { low: 0, high: names.length });
    const plot = frame(width, HEIGHT, xs, ys, x.label, y.label, label);
    const slot = (right - left) / names.length;
    const gap = slot * (slot > 20 ? 0.18 : 0.06);
    const every = Math.ceil((Math.max(...names.map((name) => name.length)) * 7 + 10) / slot);
    const thickness = (slot - 2 * gap) / series.length;
    names.forEach((name, i) => {
      if (i % every === 0) plot.append(s("text", { class: "axis", x: xs(i) + slot / 2, y: bottom + 16, "text-anchor": "middle" }, name));
      series.forEach((one, k) => {
        const value = one.values[i];
        if (!value) return;
        const height = Math.max(1.5, bottom - ys(value));
        plot.append(s("rect", { x: xs(i) + gap + k * thickness, width: Math.max(1, thickness - 1), y: bottom - height, height, fill: one.colour, rx: Math.min(3, thickness / 4) }));
      });
    });
    if (mark) {
      const at = xs(mark.after + 1);
      plot.append(s("line", { class: "refline", x1: at, x2: at, y1: top - 4, y2: bottom }),
        s("text", { class: "reftext", x: at - 6, y: top + 4, "text-anchor": "end" }, mark.text));
    }
    cursor(plot, names.map((_, i) => xs(i) + slot / 2), top, bottom, (i) =>
      [`${x.label} ${names[i]}`, ...series.map((one) => `${one.name}: ${number(one.values[i] ?? 0, 4)}`)].join("\n"));
    box.replaceChildren(plot);
  });
}

// layers: {name, colour, values} over the same x, stacked.
function areaChart({ at, layers, x, y, label }) {
  return responsive((box, width) => {
    const [top, bottom, left, right] = [20, HEIGHT - 38, 50, width - 10];
    const totals = at.map((_, i) => sum(layers.map((layer) => layer.values[i] || 0)));
    const xs = scale(...extent(at), left, right, { count: Math.max(2, Math.floor(width / 110)) });
    const ys = scale(0, extent([0, ...totals])[1] * 1.04, bottom, top, { count: 4 });
    const plot = frame(width, HEIGHT, xs, ys, x.label, y.label, label);
    let floor = at.map(() => 0);
    for (const layer of layers) {
      const ceiling = floor.map((value, i) => value + (layer.values[i] || 0));
      const upper = at.map((place, i) => `${xs(place).toFixed(1)},${ys(ceiling[i]).toFixed(1)}`);
      const lower = at.map((place, i) => `${xs(place).toFixed(1)},${ys(floor[i]).toFixed(1)}`).reverse();
      plot.append(s("polygon", { points: [...upper, ...lower].join(" "), fill: layer.colour }));
      floor = ceiling;
    }
    cursor(plot, at.map(xs), top, bottom, (i) =>
      [`${x.label} ${number(at[i], 2)}`, ...layers.map((layer) => `${layer.name}: ${number(layer.values[i] ?? 0, 4)}`)].join("\n"));
    box.replaceChildren(plot);
  });
}

// bars: {name, parts: [{name, colour, value}]}; each bar sums to 100 %.
function stackedBars(bars, unit) {
  const colours = new Map(bars.flatMap((bar) => bar.parts.filter((part) => part.value > 0).map((part) => [part.name, part.colour])));
  return h("div", {},
    h("ul", { class: "stack" }, bars.map((bar) => {
      const total = sum(bar.parts.map((part) => part.value)) || 1;
      return h("li", {},
        h("div", { class: "name" }, h("span", {}, bar.name), h("span", {}, unit(total))),
        h("div", { class: "bar", role: "img", "aria-label": `${bar.name}: ${bar.parts.filter((p) => p.value > 0).map((p) => `${p.name} ${percent(p.value / total)}`).join(", ")}` },
          bar.parts.filter((part) => part.value > 0).map((part) => {
            const fraction = part.value / total;
            const piece = h("span", { style: `width:${100 * fraction}%;background:${part.colour};color:${inkOn(part.colour)}` },
              fraction >= 0.06 ? h("i", { class: fraction < 0.15 ? "wide-only" : null }, percent(fraction)) : "");
            piece.addEventListener("pointermove", (event) => showTip(`${part.name}\n${unit(part.value)}, ${percent(fraction)}`, event.clientX, event.clientY));
            piece.addEventListener("pointerleave", hideTip);
            return piece;
          })));
    })),
    legend([...colours].map(([name, colour]) => ({ name, colour, isLine: false }))));
}
