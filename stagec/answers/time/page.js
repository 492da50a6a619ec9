// The page of `stagec time --html`: figures, the schedule of all classes, the streams and the memory of
// one, where its time goes, and what would help.
const byId = (id) => document.getElementById(id);
let shown = picture.shown;

// -- the window of time ---------------------------------------------------------------------------

function look(from, to) {
  const span = Math.min(picture.step, Math.max(to - from, 1000));
  view.from = Math.max(0, Math.min(from, picture.step - span));
  view.to = view.from + span;
  drawSoon();
}

function zoom(factor, at) {
  const middle = at === undefined ? (view.from + view.to) / 2 : Math.max(view.from, Math.min(view.to, at));
  look(middle - (middle - view.from) * factor, middle + (view.to - middle) * factor);
}

let waiting = false;
function drawSoon() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; drawAll(); });
}

function drawAll() {
  for (const panel of panels) panel.draw();
  const all = view.to - view.from >= picture.step;
  byId("window").textContent = all ? `the whole step, ${timeText(picture.step)}`
    : `${timeText(Math.round(view.from))} to ${timeText(Math.round(view.to))}, ${timeText(Math.round(view.to - view.from))} of ${timeText(picture.step)}`;
}

// -- what is told under the pointer ---------------------------------------------------------------

const rate = (value, time, unit) => `${scaled(Math.round(value / (time / 1e12)), 1000, ["", "k", "M", "G", "T", "P"].map((p) => `${p}${unit}`))}`;

function tellWhere(each, time) {
  const many = each.ranks > 1 ? `rank ${each.rank} and ${exact(each.ranks - 1)} alike` : `rank ${each.rank}`;
  const rest = make(tip, "div", { class: "rest" });
  make(rest, "div", {}, `${each.name}: ${many}`);
  make(rest, "div", {}, `${timeText(Math.round(time))} after the start`);
}

function colored(parent, color) { make(parent, "i", { class: "swatch" }).style.background = color; }

function tellNode(each, lane, stream, time, near) {
  const found = nodeAt(lane, stream, time, near);
  if (found === null || !found.row[TITLE]) {
    const part = found !== null ? found.row[PART] : waitAt(each, stream, time);
    const text = stream !== COMPUTE || part === null ? "idle" : `waits: ${picture.parts[part]}`;
    make(tip, "b", {}, text);
    return tellWhere(each, time);
  }
  const { row, start, end } = found, numbers = microbatchesOf(lane, found.piece);
  const head = make(tip, "div");
  colored(head, colors.kinds[row[KIND]]);
  make(head, "b", {}, ` ${row[TITLE]}`);
  const layer = /(?:^|\/)L(\d+)(?:\/|$)/.exec(row[TITLE]);
  const facts = [row[OP], kinds[row[KIND]]];
  if (row[SLOT] >= 0) facts.push(`microbatch ${numbers[row[SLOT]]}`);
  if (layer) facts.push(`layer ${layer[1]}`);
  make(tip, "div", {}, [...new Set(facts)].join(", "));
  make(tip, "div", {}, `takes ${timeText(end - start)}, from ${timeText(start)}`);
  const work = [];
  if (row[BYTES]) work.push(`${bytesText(row[BYTES])}${end > start ? ` (${rate(row[BYTES], end - start, "B/s")})` : ""}`);
  if (row[FLOPS]) work.push(`${scaled(row[FLOPS], 1000, ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"])}${end > start ? ` (${rate(row[FLOPS], end - start, "FLOP/s")})` : ""}`);
  if (work.length) make(tip, "div", {}, work.join(", "));
  if (row[KERNEL]) make(make(tip, "div"), "code", {}, picture.kernels[row[KERNEL]]);
  if (stream === COMPUTE) make(tip, "div", { class: "rest" }, `counts as ${picture.parts[row[PART]]}`);
  return tellWhere(each, time);
}

function waitAt(each, stream, time) {
  if (stream !== COMPUTE) return null;
  const waits = waitsOf(each), i = lastUpTo(waits.starts, time);
  return i >= 0 && waits.ends[i] > time ? waits.parts[i] : null;
}

// -- the panels -----------------------------------------------------------------------------------

class Schedule extends Panel {
  get row() { const n = picture.classes.length; return n <= 8 ? 28 : n <= 16 ? 22 : n <= 40 ? 15 : 10; }

  draw() {
    const count = picture.classes.length, row = this.row, bottom = count * row;
    const pen = this.begin(bottom + 26);
    this.axis(bottom + 2);
    const every = row < 14 ? Math.ceil(14 / row) : 1;
    picture.classes.forEach((each, i) => {
      pen.fillStyle = colors.idle;
      pen.fillRect(GUTTER, i * row + 1, this.width, row - 3);
      drawLane(this, lanesOf(each).get(COMPUTE), COMPUTE, i * row + 1, row - 3, waitsOf(each));
      if (i % every === 0 || i === shown) this.label(each.name, i * row + row / 2, i === shown);
    });
    this.path(row);
    this.line();
  }

  path(row) {
    const pen = this.pen;
    pen.save();
    pen.beginPath();
    pen.rect(GUTTER, 0, this.width, this.height);
    pen.clip();
    pen.strokeStyle = colors.path;
    pen.lineWidth = 2;
    pen.beginPath();
    for (let i = 0, at = 0; i < picture.path.length; i += 2) {
      const y = picture.path[i] * row + row - 2;
      if (i) pen.lineTo(this.x(at), y); else pen.moveTo(this.x(at), y);
      at += picture.path[i + 1];
      pen.lineTo(this.x(at), y);
    }
    pen.stroke();
    pen.restore();
  }

  tell(time, y) {
    const each = picture.classes[Math.floor(y / this.row)];
    if (!each) return false;
    tellNode(each, lanesOf(each).get(COMPUTE), COMPUTE, time, 2 / this.scale);
    return true;
  }

  click(event) {
    const at = Math.floor((event.clientY - this.canvas.getBoundingClientRect().top) / this.row);
    if (at >= 0 && at < picture.classes.length) choose(at);
  }
}

class Streams extends Panel {
  get lanes() { return [...lanesOf(picture.classes[shown])].sort((a, b) => a[0] - b[0]); }

  draw() {
    const each = picture.classes[shown], lanes = this.lanes, row = 24, bottom = lanes.length * row;
    const pen = this.begin(bottom + 26);
    this.axis(bottom + 2);
    lanes.forEach(([stream, lane], i) => {
      pen.fillStyle = colors.idle;
      pen.fillRect(GUTTER, i * row + 1, this.width, row - 4);
      drawLane(this, lane, stream, i * row + 1, row - 4, stream === COMPUTE ? waitsOf(each) : null);
      this.label(picture.streams[stream].replace("collectives over", "over"), i * row + row / 2 - 1, stream === COMPUTE);
    });
    this.line();
  }

  tell(time, y) {
    const found = this.lanes[Math.floor(y / 24)];
    if (!found) return false;
    tellNode(picture.classes[shown], found[1], found[0], time, 2 / this.scale);
    return true;
  }
}

class Memory extends Panel {
  draw() {
    const each = picture.classes[shown], held = memoryOf(each), top = 20, high = 150;
    const pen = this.begin(held ? top + high + 26 : 30);
    if (!held) {
      this.label("memory", 12);
      pen.textAlign = "left";
      pen.fillText("is not in this page for this class", GUTTER, 12);
      return;
    }
    this.axis(top + high + 2);
    const limit = data.capacity, most = each.memory.peak;
    const upTo = 1.06 * (limit && limit < 2.5 * most ? Math.max(most, limit) : most);
    const y = (value) => top + high - (value / upTo) * high;
    const [unit, name] = unitOf(upTo, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]), step = tickStep(upTo, 6, unit);
    for (let value = 0; value <= upTo; value += step) {
      pen.fillStyle = colors.line;
      pen.fillRect(GUTTER, Math.round(y(value)), this.width, 1);
      this.label(`${+(value / unit).toFixed(2)} ${name}`, y(value));
    }
    this.area(held, y, each.memory.static);
    const at = this.peak(held), x = Math.max(GUTTER + 4, Math.min(GUTTER + this.width - 4, this.x(at)));
    pen.textAlign = x < GUTTER + this.width / 2 ? "left" : "right";
    pen.fillStyle = colors.text;
    const where = at < view.from || at > view.to ? " (not in this window)" : "";
    pen.fillText(`peak ${bytesText(most)}${where}, ${bytesText(each.memory.static)} of it always`, x, y(most) - 9);
    if (limit && limit <= upTo) {
      pen.fillStyle = colors.alarm;
      pen.fillRect(GUTTER, y(limit), this.width, 1.5);
      pen.textAlign = "right";
      pen.fillText(`memory of the device: ${bytesText(limit)}`, GUTTER + this.width, y(limit) - 8);
    }
    this.line();
  }

  area(held, y, fixed) {
    const pen = this.pen, { times, bytes } = held;
    pen.save();
    pen.beginPath();
    pen.rect(GUTTER, 0, this.width, this.height);
    pen.clip();
    pen.beginPath();
    let i = Math.max(0, lastUpTo(times, view.from)), column = -1, highest = 0;
    pen.moveTo(this.x(view.from), y(0));
    for (; i < times.length && times[i] <= view.to; i += 1) {
      const x = this.x(times[i]), next = i + 1 < times.length ? this.x(times[i + 1]) : this.x(picture.step);
      highest = Math.floor(x) === column ? Math.max(highest, bytes[i]) : bytes[i];
      column = Math.floor(x);
      pen.lineTo(x, y(highest));
      pen.lineTo(next, y(highest));
    }
    pen.lineTo(this.x(view.to), y(0));
    pen.closePath();
    pen.fillStyle = colors.memory;
    pen.fill();
    pen.fillStyle = colors.static;
    pen.fillRect(GUTTER, y(fixed), this.width, y(0) - y(fixed));
    pen.restore();
  }

  peak(held) {
    let best = 0;
    held.bytes.forEach((value, i) => { if (value > held.bytes[best]) best = i; });
    return held.times[best];
  }

  tell(time) {
    const each = picture.classes[shown], held = memoryOf(each);
    if (!held) return false;
    const i = lastUpTo(held.times, time);
    const value = i < 0 ? each.memory.static : held.bytes[i];
    make(tip, "b", {}, bytesText(value));
    make(tip, "div", {}, `${exact(value)} bytes, ${exact(value - each.memory.static)} of them of this moment`);
    tellWhere(each, time);
    return true;
  }
}

// -- where the time goes --------------------------------------------------------------------------

const FIXED = ["matrix products", "attention", "element-wise", "launch gaps", "interference"];
function partColor(name, number) {
  if (FIXED.includes(name)) return `var(--p-${FIXED.indexOf(name)})`;
  if (name === "bubble") return "var(--idle)";
  if (name === "optimizer") return "var(--k-optimizer)";
  if (name === "host copies") return "var(--k-copy)";
  if (name.endsWith("message")) return "var(--k-message)";
  return `color-mix(in srgb, var(--k-collective) ${[100, 72, 50][number % 3]}%, var(--k-gradient))`;
}
const exposed = picture.parts.filter((name) => name.startsWith("exposed") && !name.endsWith("message"));
const colorOf = (part) => partColor(picture.parts[part], Math.max(0, exposed.indexOf(picture.parts[part])));
const percent = (part) => `${(100 * part / picture.step).toFixed(1)}%`;

function drawBreakdown() {
  const stack = byId("stack"), table = byId("parts");
  stack.replaceChildren();
  table.replaceChildren();
  const order = picture.parts.map((_, part) => picture.classes.reduce((sum, each) => sum + (each.breakdown.find(([p]) => p === part) || [0, 0])[1], 0));
  picture.classes.forEach((each, i) => {
    const name = make(stack, "span", { class: i === shown ? "name shown" : "name" }, each.name);
    name.addEventListener("click", () => choose(i));
    const bar = make(stack, "div", { class: "parts" });
    const parts = each.breakdown.filter(([part]) => part !== 0).sort((a, b) => order[b[0]] - order[a[0]]);
    for (const [part, time] of parts) {
      const box = make(bar, "i");
      box.style.width = `${100 * time / picture.step}%`;
      box.style.background = colorOf(part);
      box.addEventListener("pointermove", (event) => {
        tip.replaceChildren();
        make(tip, "b", {}, picture.parts[part]);
        make(tip, "div", {}, `${timeText(time)}, ${percent(time)} of the step of ${each.name}`);
        placeTip(event.clientX, event.clientY);
      });
      box.addEventListener("pointerleave", () => { tip.hidden = true; });
    }
  });
  const each = picture.classes[shown];
  rowOf(table, "th", "", `${each.name}`, "time", "share");
  for (const [part, time] of each.breakdown) rowOf(table, "td", colorOf(part), picture.parts[part], timeText(time), percent(time));
  rowOf(table, "th", "", "the step", timeText(each.breakdown.reduce((sum, [, time]) => sum + time, 0)), "100.0%");
}

function rowOf(table, tag, color, name, ...numbers) {
  const line = make(table, "tr"), first = make(line, tag);
  if (color) colored(first, color);
  first.append(`${color ? " " : ""}${name}`);
  for (const text of numbers) make(line, tag, { class: "number" }, text);
}

function drawLevers() {
  const box = byId("levers");
  const rows = [{ name: "as it is", step_seconds: picture.step / 1e12, speedup: 1 }, ...data.levers];
  for (const lever of rows) {
    make(box, "span", {}, lever.name);
    const track = make(box, "div", { class: lever.speedup === 1 && lever.name === "as it is" ? "track now" : "track" });
    make(track, "i").style.width = `${Math.min(100, 100 * lever.step_seconds * 1e12 / picture.step)}%`;
    const gain = lever.name === "as it is" ? "" : `, ${(100 * (lever.speedup - 1)).toFixed(1)}% faster`;
    make(box, "span", {}, `${timeText(Math.round(lever.step_seconds * 1e12))}${gain}`);
  }
}

function drawPath() {
  const table = byId("path");
  const head = make(table, "tr");
  for (const name of ["class", "phase", "op", "counts as"]) make(head, "th", {}, name);
  for (const name of ["nodes", "time", "share"]) make(head, "th", { class: "number" }, name);
  const shownLinks = data.path.slice(0, 14), rest = data.path.slice(14);
  const sum = (links, key) => links.reduce((total, link) => total + link[key], 0);
  if (rest.length) shownLinks.push({ class: `${rest.length} others`, phase: "", op: "", part: "", nodes: sum(rest, "nodes"), seconds: sum(rest, "seconds") });
  for (const link of shownLinks) {
    const line = make(table, "tr");
    for (const key of ["class", "phase", "op", "part"]) make(line, "td", {}, link[key]);
    const time = Math.round(link.seconds * 1e12);
    for (const text of [exact(link.nodes), timeText(time), percent(time)]) make(line, "td", { class: "number" }, text);
  }
}

// -- the page -------------------------------------------------------------------------------------

function choose(number) {
  shown = number;
  byId("class").value = number;
  drawBreakdown();
  drawSoon();
}

function addLegend() {
  const used = new Set(picture.nodes.map((row) => row[KIND])), box = byId("legend");
  if (picture.classes.some((each) => each.waits.length)) used.add(kinds.indexOf("wait"));
  const names = { collective: "collective", message: "message of the pipeline", copy: "copy to or from the host", wait: "compute waits for communication" };
  kinds.forEach((kind, number) => {
    if (!used.has(number)) return;
    const item = make(box, "span");
    colored(item, `var(--k-${kind})`);
    item.append(names[kind] || kind);
  });
  const idle = make(box, "span");
  colored(idle, "var(--idle)");
  idle.append("idle");
  const line = make(box, "span");
  make(line, "i", { class: "line" });
  line.append("critical path");
}

function start() {
  readColors();
  for (const [name, value] of data.facts) {
    const fact = make(byId("facts"), "div");
    make(fact, "b", {}, value);
    make(fact, "span", {}, name);
  }
  const choice = byId("class");
  picture.classes.forEach((each, i) => make(choice, "option", { value: i }, `${each.name}: ${exact(each.ranks)} rank${each.ranks === 1 ? "" : "s"}`));
  choice.value = shown;
  choice.addEventListener("change", () => choose(Number(choice.value)));
  byId("in").addEventListener("click", () => zoom(0.5));
  byId("out").addEventListener("click", () => zoom(2));
  byId("whole").addEventListener("click", () => look(0, picture.step));
  addLegend();
  new Schedule(byId("schedule"), `the schedule of ${picture.classes.length} rank classes over a step of ${timeText(picture.step)}`);
  new Streams(byId("streams"), "what each stream of a rank runs");
  new Memory(byId("memory"), "what a rank holds");
  drawBreakdown();
  drawLevers();
  drawPath();
  drawAll();
}

addEventListener("keydown", (event) => {
  if (event.target instanceof HTMLSelectElement || event.ctrlKey || event.metaKey || event.altKey) return;
  const by = (view.to - view.from) / 5;
  const keys = { "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: () => look(0, picture.step),
    ArrowLeft: () => look(view.from - by, view.to - by), ArrowRight: () => look(view.from + by, view.to + by) };
  if (!keys[event.key]) return;
  event.preventDefault();
  keys[event.key]();
});
addEventListener("resize", drawSoon);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readColors(); drawSoon(); });
start();
