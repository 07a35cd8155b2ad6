"use strict";
// Draws the charts and the sample browser from the JSON in #data. Text from the run only ever becomes textContent.

const data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";

function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function shape(tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

const color = (line) => `var(--c${line.color % 10})`;

// ---- numbers

function format(value, kind) {
  if (value === null) return "–";
  const size = Math.abs(value);
  if (kind === "percent") return `${+(value * 100).toPrecision(size < 0.1 ? 2 : 3)}%`;
  if (kind === "seconds") return `${+value.toPrecision(3)} s`;
  if (value !== 0 && (size < 1e-3 || kind === "scientific")) return value.toExponential(size && Number(value.toPrecision(1)) === value ? 0 : 1);
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
  return `${+value.toPrecision(4)}`;
}

function niceTicks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
  const ticks = [];
  for (let tick = Math.ceil(low / step - 1e-9) * step; tick <= high + step * 1e-9; tick += step) ticks.push(+tick.toPrecision(12));
  return ticks;
}

function logTicks(low, high, most) {
  const first = Math.ceil(Math.log10(low) - 1e-9), last = Math.floor(Math.log10(high) + 1e-9);
  const every = Math.max(1, Math.ceil((last - first + 1) / most));
  const ticks = [];
  for (let power = first; power <= last; power += every) ticks.push(10 ** power);
  return ticks;
}

function smoothed(values, weight) {
  let mean = null, norm = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = (mean ?? 0) * weight + value * (1 - weight);
    norm = norm * weight + (1 - weight);
    return mean / norm;
  });
}

// ---- scales

function extent(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value === null) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low > high ? [0, 1] : [low, high];
}

function scale(low, high, from, to, log) {
  const f = log ? Math.log10 : (v) => v;
  const span = f(high) - f(low) || 1;
  return (value) => from + ((f(value) - f(low)) / span) * (to - from);
}

function yRange(panel, layers) {
  let [low, high] = extent(layers.flat());
  if (panel.y_log) return [10 ** Math.floor(Math.log10(low) - 0.05), 10 ** Math.ceil(Math.log10(high) + 0.05)];
  if (panel.stacked || (low > 0 && low < high / 2)) low = 0;
  if (panel.format === "percent" && low >= 0 && high > 0.35) return [0, 1];
  if (low === high) return low === 0 ? [0, 1] : [low - Math.abs(low) / 2, high + Math.abs(high) / 2];
  const room = (high - low) * 0.08;
  return [low === 0 ? 0 : low - room, high + room];
}

// ---- one chart

class ChartView {
  constructor(figure, panel) {
    this.figure = figure;
    this.panel = panel;
    this.format = panel.format === "scientific" && !panel.y_log ? "number" : panel.format;
    this.hidden = new Set();
    this.weight = 0;
    this.svg = shape("svg", { role: "img", "aria-label": panel.title, class: panel.tall ? "tall" : "" });
    this.tip = element("div", { class: "tip", hidden: "" });
    figure.append(element("figcaption", {}, element("b", {}, panel.title), element("p", {}, panel.help)), this.legend(), this.svg, this.tip);
    this.svg.addEventListener("pointermove", (event) => this.hover(event));
    this.svg.addEventListener("pointerleave", () => this.leave());
    new ResizeObserver(() => this.draw()).observe(figure);
  }

  legend() {
    const box = element("div", { class: "legend" });
    if (this.panel.lines.length < 2) return box;
    for (const line of this.panel.lines) {
      const dot = element("span", { class: "dot", style: `background:${color(line)};opacity:${line.alpha}` });
      const button = element("button", { "aria-pressed": "true", title: "show or hide" }, dot, line.label);
      button.addEventListener("click", () => {
        if (!this.hidden.delete(line)) this.hidden.add(line);
        button.setAttribute("aria-pressed", String(!this.hidden.has(line)));
        this.draw();
      });
      box.append(button);
    }
    return box;
  }

  visible() {
    return this.panel.lines.filter((line) => !this.hidden.has(line));
  }

  // What is drawn of a line: a log axis has no place for zero; layers of a stack stand on those below them.
  layers(lines) {
    const base = [];
    return lines.map((line) => line.y.map((value, i) => {
      if (this.panel.stacked) return (base[i] = (base[i] ?? 0) + (value ?? 0));
      return this.panel.y_log && !(value > 0) ? null : value;
    }));
  }

  draw() {
    const { panel, svg } = this;
    const width = svg.clientWidth, height = svg.clientHeight;
    if (!width) return;
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const lines = this.visible(), raw = this.layers(lines);
    const smooth = this.weight && !panel.stacked && !panel.x_log;
    const many = (line) => smooth && !line.dashed && line.x.length > 30; // few points are no noise
    const shown = raw.map((y, i) => (many(lines[i]) ? smoothed(y, this.weight) : y));
    let [xLow, xHigh] = extent(lines.flatMap((line) => line.x));
    if (xLow === xHigh && !panel.x_log) [xLow, xHigh] = [xLow - 1, xHigh + 1];
    else if (panel.stacked && lines.length) { // half a bar on either side
      const half = (xHigh - xLow) / (lines[0].x.length - 1) / 2;
      [xLow, xHigh] = [xLow - half, xHigh + half];
    }
    if (panel.scatter) [xLow, xHigh] = [0, 1];
    const [yLow, yHigh] = panel.scatter ? [0, 1] : yRange(panel, raw);
    this.x = scale(xLow, xHigh, 46, width - 12, panel.x_log);
    this.y = scale(yLow, yHigh, height - 24, 10, panel.y_log);
    this.axes(xLow, xHigh, yLow, yHigh, width, height);
    if (panel.marked) this.marks(xLow, xHigh, height);
    if (panel.scatter) this.drawDots(lines);
    else if (panel.stacked) this.drawStack(lines, shown, height - 24);
    else lines.forEach((line, i) => this.drawLine(line, shown[i], many(line) ? raw[i] : null));
    if (!raw.flat().some((value) => value !== null)) svg.append(shape("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "no finite value"));
    this.cursor = shape("g", {});
    svg.append(this.cursor);
  }

  axes(xLow, xHigh, yLow, yHigh, width, height) {
    const { panel, svg } = this;
    const yTicks = panel.y_log ? logTicks(yLow, yHigh, 5) : niceTicks(yLow, yHigh, 6);
    for (const tick of yTicks) {
      const y = this.y(tick);
      svg.append(shape("line", { class: "grid", x1: 46, x2: width - 12, y1: y, y2: y }));
      svg.append(shape("text", { x: 40, y: y + 4, "text-anchor": "end" }, format(tick, this.format)));
    }
    const xTicks = panel.x_log ? panel.lines[0].x : niceTicks(xLow, xHigh, Math.min(6, width / 90));
    let right = -Infinity;
    for (const tick of xTicks) {
      if (panel.x_label === "step" && !Number.isInteger(tick)) continue;
      const x = this.x(tick), label = format(tick, "number");
      if (x - label.length * 3.5 < right + 4) continue;
      right = x + label.length * 3.5;
      svg.append(shape("text", { x, y: height - 6, "text-anchor": "middle" }, label));
    }
    if (panel.x_label !== "step") svg.append(shape("text", { x: panel.scatter ? 58 : 16, y: height - 6 }, panel.x_label));
  }

  // Where the governor spoke.
  marks(xLow, xHigh, height) {
    for (const step of data.marks.filter((step) => step >= xLow && step <= xHigh)) {
      this.svg.append(shape("line", { class: "mark", x1: this.x(step), x2: this.x(step), y1: 10, y2: height - 24 }));
    }
  }

  path(xs, ys) {
    let pen = "M", out = "";
    ys.forEach((value, i) => {
      if (value === null) { pen = "M"; return; }
      out += `${pen}${this.x(xs[i]).toFixed(1)},${this.y(value).toFixed(1)}`;
      pen = "L";
    });
    return out;
  }

  drawLine(line, ys, raw) {
    if (raw) this.svg.append(shape("path", { class: "raw", d: this.path(line.x, raw), stroke: color(line) }));
    this.svg.append(shape("path", { class: "trace", d: this.path(line.x, ys), stroke: color(line), opacity: line.alpha, "stroke-dasharray": line.dashed ? "6 5" : "none" }));
    if (line.dashed || (line.x.length > 24 && ys.some((v, i) => v !== null && ys[i + 1] !== null))) return;
    ys.forEach((value, i) => {
      if (value !== null) this.svg.append(shape("circle", { cx: this.x(line.x[i]), cy: this.y(value), r: 3, fill: color(line), opacity: line.alpha }));
    });
  }

  drawDots(lines) {
    this.svg.append(shape("path", { class: "diagonal", d: `M${this.x(0)},${this.y(0)}L${this.x(1)},${this.y(1)}` }));
    for (const line of lines) {
      const d = line.x.map((x, i) => `M${this.x(x).toFixed(1)},${this.y(line.y[i]).toFixed(1)}h0`).join("");
      this.svg.append(shape("path", { class: "dots", d, stroke: color(line) }));
    }
  }

  drawStack(lines, tops, floor) {
    const xs = lines.length ? lines[0].x : [];
    const width = Math.max(1, (this.x(xs[xs.length - 1]) - this.x(xs[0])) / Math.max(1, xs.length - 1));
    const bar = xs.length > 1 ? width * (width > 4 ? 0.8 : 1.02) : 40;
    lines.forEach((line, layer) => {
      const d = xs.map((x, i) => {
        const bottom = layer ? this.y(tops[layer - 1][i]) : floor, top = this.y(tops[layer][i]);
        return `M${(this.x(x) - bar / 2).toFixed(1)},${bottom.toFixed(1)}h${bar.toFixed(2)}V${top.toFixed(1)}h${(-bar).toFixed(2)}z`;
      }).join("");
      this.svg.append(shape("path", { d, fill: color(line) }));
    });
  }

  hover(event) {
    if (!this.cursor || this.panel.scatter) return;
    const lines = this.visible().filter((line) => !line.dashed);
    const box = this.svg.getBoundingClientRect(), at = event.clientX - box.left;
    const nearest = (line) => line.x.reduce((best, x, i) => (Math.abs(this.x(x) - at) < Math.abs(this.x(line.x[best]) - at) ? i : best), 0);
    const places = lines.map(nearest);
    if (!lines.length || places.some((i, n) => lines[n].x[i] === undefined)) return;
    const closest = places.reduce((best, i, n) => (Math.abs(this.x(lines[n].x[i]) - at) < Math.abs(this.x(best) - at) ? lines[n].x[i] : best), lines[0].x[places[0]]);
    this.cursor.replaceChildren(shape("line", { class: "cursor", x1: this.x(closest), x2: this.x(closest), y1: 10, y2: box.height - 24 }));
    this.tip.replaceChildren(element("div", {}, `${this.panel.x_label} ${format(closest, "number")}`));
    lines.forEach((line, n) => this.tell(line, places[n]));
    this.tip.hidden = false;
    const outer = this.figure.getBoundingClientRect();
    const left = box.left - outer.left + this.x(closest) + 14;
    const flip = left + this.tip.offsetWidth > this.figure.clientWidth - 8;
    this.tip.style.left = `${Math.max(4, flip ? left - this.tip.offsetWidth - 28 : left)}px`;
    this.tip.style.top = `${box.top - outer.top + 14}px`;
  }

  tell(line, i) {
    const value = line.y[i];
    const dot = element("span", { class: "dot", style: `background:${color(line)};opacity:${line.alpha}` });
    this.tip.append(element("div", {}, dot, `${line.label} `, element("b", {}, format(value, this.format))));
    if (!this.panel.stacked && value !== null && (!this.panel.y_log || value > 0)) {
      this.cursor.append(shape("circle", { cx: this.x(line.x[i]), cy: this.y(value), r: 4, fill: color(line) }));
    }
  }

  leave() {
    this.tip.hidden = true;
    this.cursor?.replaceChildren();
  }
}

const views = data.panels.map((panel, i) => new ChartView(document.querySelector(`[data-panel="${i}"]`), panel));
document.getElementById("smooth")?.addEventListener("input", (event) => {
  for (const view of views) {
    view.weight = Number(event.target.value);
    view.draw();
  }
});

// ---- answers

function badge(answer) {
  if (answer.reward === null) return element("span", { class: "badge bad" }, "reward failed");
  const kind = answer.reward >= data.reward.high ? "good" : answer.reward <= data.reward.low ? "bad" : "";
  return element("span", { class: `badge ${kind}` }, format(answer.reward, "number"));
}

function card(answer) {
  const stop = answer.stop_reason === "length" ? "cut off" : answer.stop_reason;
  const top = element("div", { class: "top" }, badge(answer), `step ${answer.step}`, element("span", {}, `${answer.num_tokens} tokens, ${stop}`), element("span", {}, answer.sample));
  if (answer.times > 1) top.append(element("span", {}, `said ${answer.times} times`));
  const node = element("article", { class: "card answer" }, top);
  for (const message of answer.prompt) {
    node.append(element("pre", { class: "prompt" }, answer.prompt.length > 1 ? `${message.role}: ${message.content}` : message.content));
  }
  node.append(element("pre", { class: "text" }, answer.text || "(empty)"));
  if (answer.expected) node.append(element("div", { class: "expected" }, "expected ", element("code", {}, answer.expected)));
  const parts = Object.entries(answer.parts).map(([name, value]) => `${name} ${format(Number(value), "number")}`).join(" · ");
  const reasons = element("ul", {}, ...[parts, ...answer.reasons].filter(Boolean).map((reason) => element("li", {}, reason)));
  if (reasons.childElementCount) node.append(reasons);
  return node;
}

// An answer to each prompt before a second one to any.
function spread(answers) {
  const seen = new Map();
  const turns = answers.map((answer) => {
    const turn = seen.get(answer.sample) ?? 0;
    seen.set(answer.sample, turn + 1);
    return { answer, turn };
  });
  return turns.sort((a, b) => a.turn - b.turn).map(({ answer }) => answer);
}

const judged = data.samples.filter((a) => a.reward !== null);
const VIEWS = {
  "Last": () => data.samples.slice().reverse(),
  "First": () => data.samples,
  "Best": () => judged.slice().sort((a, b) => b.reward - a.reward || b.step - a.step),
  "Worst": () => judged.slice().sort((a, b) => a.reward - b.reward || b.step - a.step),
  "Cut off": () => data.samples.filter((a) => a.stop_reason === "length").reverse(),
  "Fell apart": () => data.samples.filter((a) => (a.flaws ?? []).length).reverse(),
  "Reward failed": () => data.samples.filter((a) => a.reward === null).reverse(),
};

class Browser {
  constructor(box) {
    this.box = box;
    this.view = "First and last";
    this.count = 10;
    this.list = element("div");
    this.search = element("input", { type: "search", placeholder: "Search prompts, answers, reasons", "aria-label": "Search answers" });
    this.search.addEventListener("input", () => this.show());
    this.buttons = ["First and last", ...Object.keys(VIEWS)].filter((name) => !VIEWS[name] || VIEWS[name]().length).map((name) => this.button(name));
    box.append(element("div", { class: "tools" }, ...this.buttons, this.search), this.list);
    this.show();
  }

  button(name) {
    const node = element("button", {}, name);
    node.addEventListener("click", () => { this.view = name; this.count = 10; this.show(); });
    return node;
  }

  matches(answer) {
    const wanted = this.search.value.trim().toLowerCase();
    const text = [answer.text, answer.sample, ...answer.reasons, ...answer.prompt.map((m) => m.content)].join("\n");
    return !wanted || text.toLowerCase().includes(wanted);
  }

  show() {
    for (const button of this.buttons) button.setAttribute("aria-pressed", String(button.textContent === this.view));
    this.list.replaceChildren(...(VIEWS[this.view] ? this.single() : this.pair()));
  }

  single() {
    const found = VIEWS[this.view]().filter((answer) => this.matches(answer));
    const cards = element("div", { class: "answers" }, ...found.slice(0, this.count).map(card));
    if (!found.length) cards.append(element("p", { class: "card empty" }, "No answer matches."));
    if (found.length <= this.count) return [cards];
    const more = element("button", { class: "more" }, `Show more (${found.length - this.count} left)`);
    more.addEventListener("click", () => { this.count += 20; this.show(); });
    return [cards, more];
  }

  pair() {
    const found = data.samples.filter((answer) => this.matches(answer));
    const first = spread(found).slice(0, 4);
    const last = spread(found.filter((answer) => !first.includes(answer)).reverse()).slice(0, 4);
    const column = (title, answers) => element("div", { class: "answers" }, element("h3", {}, title), ...answers.map(card));
    return [element("div", { class: "pair" }, column("First steps", first), column("Last steps", last))];
  }
}

const box = document.getElementById("samples");
if (box && data.samples.length) new Browser(box);
