// The page of `stagec time --html`: the schedule of all classes, the streams and the memory of one, and
// where its time goes.
let shown = picture.classes.findIndex((each) => isClass(each.name, state.get("class")));
if (shown < 0) shown = picture.shown;
// Of each node whether the search wants it; null without a search. `places` are those of the class.
let wanted = null, places = [], place = -1;

// -- the window of time ---------------------------------------------------------------------------

function look(from, to) {
  const span = Math.min(picture.step, Math.max(to - from, 1000));
  view.from = Math.max(0, Math.min(from, picture.step - span));
  view.to = view.from + span;
  const whole = span >= picture.step;
  remember("from", whole ? null : Math.round(view.from));
  remember("to", whole ? null : Math.round(view.to));
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
  GUTTER = Math.round(Math.min(10 * em, 0.27 * document.body.clientWidth));
  for (const panel of panels) panel.tellHere();
  for (const panel of panels) panel.draw();
  const whole = view.to - view.from >= picture.step;
  byId("window").textContent = whole ? `the whole step, ${timeText(picture.step)}`
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
  get row() { const n = picture.classes.length; return em * (n <= 8 ? 2 : n <= 16 ? 1.6 : n <= 40 ? 1.1 : 0.7); }

  draw() {
    const count = picture.classes.length, row = this.row, bottom = count * row;
    const pen = this.begin(bottom + 2 * em);
    this.axis(bottom + 2);
    const every = Math.max(1, Math.ceil(em / row));
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
    pen.strokeStyle = colors.text;
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
    if (at >= 0 && at < picture.classes.length) showClass(at);
  }
}

class Streams extends Panel {
  get lanes() { return [...lanesOf(picture.classes[shown])].sort((a, b) => a[0] - b[0]); }

  get row() { return 1.7 * em; }

  draw() {
    const each = picture.classes[shown], lanes = this.lanes, row = this.row, bottom = lanes.length * row;
    const pen = this.begin(bottom + 2 * em);
    this.axis(bottom + 2);
    lanes.forEach(([stream, lane], i) => {
      pen.fillStyle = colors.idle;
      pen.fillRect(GUTTER, i * row + 2, this.width, row - 4);
      drawLane(this, lane, stream, i * row + 2, row - 4, stream === COMPUTE ? waitsOf(each) : null);
      this.label(picture.streams[stream].replace("collectives over", "over").replace(/(receives|sends) over/, "$1"), i * row + row / 2, stream === COMPUTE);
    });
    this.line();
  }

  tell(time, y) {
    const found = this.lanes[Math.floor(y / this.row)];
    if (!found) return false;
    tellNode(picture.classes[shown], found[1], found[0], time, 2 / this.scale);
    return true;
  }
}

class Memory extends Panel {
  draw() {
    const each = picture.classes[shown], held = memoryOf(each), high = 11 * em;
    const limit = data.rooms[shown], near = limit && limit < 4 * (each.memory ? each.memory.peak : 0), top = (near ? 1.5 : 2.8) * em;
    const pen = this.begin(held ? top + high + 2 * em : 2 * em);
    if (!held) {
      this.label("memory", 12);
      pen.textAlign = "left";
      pen.fillText("is not in this page for this class", GUTTER, 12);
      return;
    }
    this.axis(top + high + 2);
    const most = each.memory.peak;
    const upTo = 1.06 * (near ? Math.max(most, limit) : most);
    const y = (value) => top + high - (value / upTo) * high;
    const [unit, name] = unitOf(upTo, 1024, BYTE_UNITS), step = tickStep(upTo, 6, unit);
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
    pen.fillText(`peak ${bytesText(most)}${where}`, x, y(most) - 0.65 * em);
    if (limit) {
      const line = near ? y(limit) : 1, below = near && y(limit) < em;
      pen.fillStyle = colors.alarm;
      pen.fillRect(GUTTER, line, this.width, 1.5);
      pen.textAlign = pen.textAlign === "left" ? "right" : "left";
      const text = `memory for the job: ${bytesText(limit)}${near ? "" : ", above the axis"}`;
      pen.fillText(text, pen.textAlign === "right" ? GUTTER + this.width : GUTTER + 4, line + (near && !below ? -0.6 : 0.75) * em);
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
    pen.fillStyle = colors.c5;
    pen.fill();
    pen.fillStyle = colors.c0;
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
    make(tip, "div", {}, `${exact(value)} bytes: ${bytesText(each.memory.static)} for the whole step, ${bytesText(value - each.memory.static)} at this moment`);
    tellWhere(each, time);
    return true;
  }
}

// -- the search -----------------------------------------------------------------------------------

// Marks what has these words in its name or op, and lists where it is in the class that is shown.
function search(text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const has = (row) => words.every((word) => `${row[TITLE]} ${row[OP]}`.toLowerCase().includes(word));
  wanted = words.length ? picture.nodes.map(has) : null;
  places = [];
  place = -1;
  if (wanted) {
    for (const [stream, lane] of lanesOf(picture.classes[shown])) {
      lane.entries.forEach((number, i) => {
        const entry = entryOf(number);
        for (const at of entry.streams.get(stream).places) {
          if (wanted[entry.nodes[at]]) places.push([lane.bases[i] + entry.starts[at], lane.bases[i] + entry.ends[at]]);
        }
      });
    }
    places.sort((a, b) => a[0] - b[0]);
  }
  const time = places.reduce((sum, [start, end]) => sum + end - start, 0);
  byId("count").textContent = wanted ? `${exact(places.length)} in ${picture.classes[shown].name}, ${timeText(time)}` : "";
  remember("find", text);
  drawSoon();
}

function goTo(by) {
  if (!places.length) return;
  place = (place + by + places.length) % places.length;
  const [start, end] = places[place], span = Math.max(8 * (end - start), 1000);
  look((start + end - span) / 2, (start + end + span) / 2);
  byId("count").textContent = `${exact(place + 1)} of ${exact(places.length)}, ${timeText(end - start)}`;
}

// -- the page -------------------------------------------------------------------------------------

const percent = (part) => `${(100 * part / picture.step).toFixed(1)}%`;

function drawParts() {
  const table = byId("parts"), each = picture.classes[shown];
  table.replaceChildren();
  const row = (tag, ...texts) => {
    const line = make(table, "tr");
    texts.forEach((text, i) => make(line, tag, i ? { class: "number" } : {}, text));
  };
  row("th", each.name, "time", "share of the step");
  for (const [part, time] of each.breakdown) row("td", picture.parts[part], timeText(time), percent(time));
  row("th", "the step", timeText(each.breakdown.reduce((sum, [, time]) => sum + time, 0)), "100.0%");
}

function showClass(number) {
  shown = number;
  byId("class").value = number;
  remember("class", picture.classes[number].name);
  drawParts();
  search(byId("find").value);
}

// What computes on a rank of a class.
function runsOf(each) {
  const lane = lanesOf(each).get(COMPUTE), runs = [];
  lane.entries.forEach((number, i) => {
    const entry = entryOf(number);
    for (const at of entry.streams.get(COMPUTE).places) {
      const phase = MOMENT_PHASES[kinds[picture.nodes[entry.nodes[at]][KIND]]];
      if (phase) runs.push([phase, lane.bases[i] + entry.starts[at], lane.bases[i] + entry.ends[at]]);
    }
  });
  return runs;
}

// Shows a moment of another page, in a twentieth of the step.
function lookAt(moment) {
  const time = timeOf(runsOf(picture.classes[shown]), moment);
  if (time === null) return;
  look(time - picture.step / 40, time + picture.step / 40);
  cursor = time;
}

placeHere = () => {
  const each = picture.classes[shown], whole = view.to - view.from >= picture.step;
  const at = whole ? null : momentAt(runsOf(each), cursor === null ? (view.from + view.to) / 2 : cursor);
  return { class: each.name, ...(at === null ? {} : { at }) };
};

function addLegend() {
  const used = new Set(picture.nodes.map((row) => row[KIND])), box = byId("legend");
  if (picture.classes.some((each) => each.waits.length)) used.add(kinds.indexOf("wait"));
  const names = { weights: "gradients of weights", gradient: "sum of gradients", collective: "collective", message: "message of the pipeline", copy: "copy to or from the host", wait: "compute waits for communication" };
  const item = (color, name) => { const span = make(box, "span"); colored(span, color); span.append(name); };
  kinds.forEach((kind, number) => { if (used.has(number)) item(`var(--c${KIND_COLORS[kind]})`, names[kind] || kind); });
  item("var(--idle)", "idle");
  const line = make(box, "span");
  make(line, "i", { class: "stroke" });
  line.append("critical path");
  item("var(--c0)", "memory for the whole step");
  item("var(--c5)", "memory for a time");
}

function start() {
  readColors();
  const choice = byId("class"), find = byId("find");
  picture.classes.forEach((each, i) => make(choice, "option", { value: i }, `${each.name}: ${exact(each.ranks)} rank${each.ranks === 1 ? "" : "s"}`));
  choice.value = shown;
  choice.addEventListener("change", () => showClass(Number(choice.value)));
  whenChosen.push((key) => { if (key.startsWith("class")) showClass(Number(key.slice(5))); });
  byId("in").addEventListener("click", () => zoom(0.5));
  byId("out").addEventListener("click", () => zoom(2));
  byId("whole").addEventListener("click", () => look(0, picture.step));
  find.value = state.get("find") || "";
  find.addEventListener("input", () => search(find.value));
  find.addEventListener("keydown", (event) => { if (event.key === "Enter") goTo(event.shiftKey ? -1 : 1); });
  addLegend();
  new Schedule("schedule", "Schedule", `the schedule of ${picture.classes.length} rank classes over a step of ${timeText(picture.step)}`);
  new Streams("streams", "Streams of one rank", "what each stream of a rank runs");
  new Memory("memory", "Memory of one rank", "memory of one rank");
  if (state.has("from")) look(Number(state.get("from")), Number(state.get("to")));
  else if (state.has("at")) lookAt(state.get("at"));
  drawParts();
  if (find.value) search(find.value);
  drawAll();
}

addEventListener("keydown", (event) => {
  if (event.target.closest("select, input, svg") || event.ctrlKey || event.metaKey || event.altKey) return;
  const by = (view.to - view.from) / 5;
  const keys = { "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: () => look(0, picture.step),
    ArrowLeft: () => look(view.from - by, view.to - by), ArrowRight: () => look(view.from + by, view.to + by) };
  if (!keys[event.key]) return;
  event.preventDefault();
  keys[event.key]();
});
const again = () => { readColors(); drawSoon(); };
addEventListener("resize", again);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
start();
