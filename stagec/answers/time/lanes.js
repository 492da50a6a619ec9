// Pictures of `stagec time --html` on one axis of time: a canvas with a row for each lane.

const RIGHT = 12, NARROW = 1.3, COARSE = 40, NAMED = 48;
// The color of each kind of node, of those of all charts.
const KIND_COLORS = { forward: 0, backward: 2, weights: 7, recompute: 5, gradient: 4, optimizer: 6, collective: 1, message: 3, copy: 8, wait: 11 };
const view = { from: 0, to: picture.step };
const panels = [];
let cursor = null;
// Pixels of a line of text, of the names at the left, and the pen of a picture that is saved.
let em = 14, GUTTER = 140, saved = null;

let colors = {};
function readColors() {
  const now = getComputedStyle(document.documentElement), probe = make(document.body, "i");
  const of = (name) => { probe.style.color = `var(--${name})`; return getComputedStyle(probe).color; };
  colors = { kinds: kinds.map((kind) => of(`c${KIND_COLORS[kind]}`)), inks: kinds.map((kind) => of(`i${KIND_COLORS[kind]}`)) };
  for (const name of ["back", "text", "quiet", "line", "idle", "alarm", "c0", "c5"]) colors[name] = of(name);
  probe.remove();
  em = parseFloat(now.fontSize);
}

// A pen that draws as that of a canvas does, into an SVG.
class SvgPen {
  constructor(width, height, measure) {
    this.root = fill(document.createElementNS(svgSpace, "svg"), { xmlns: svgSpace, width, height, viewBox: `0 0 ${width} ${height}` });
    Object.assign(this, { at: this.root, stack: [], path: "", box: null, globalAlpha: 1, lineWidth: 1, textAlign: "left", measure });
  }

  measureText(text) { this.measure.font = this.font; return this.measure.measureText(text); }

  add(tag, attributes, text) {
    if (this.globalAlpha < 1) attributes.opacity = this.globalAlpha;
    for (const [name, value] of Object.entries(attributes)) if (typeof value === "number") attributes[name] = +value.toFixed(2);
    return shape(this.at, tag, attributes, text);
  }

  fillRect(x, y, width, height) { this.add("rect", { x, y, width, height, fill: this.fillStyle }); }

  strokeText(text, x, y) { this.fillText(text, x, y, { stroke: this.strokeStyle, "stroke-width": this.lineWidth }); }

  fillText(text, x, y, more) {
    const [, weight, size] = /^(600 )?([\d.]+px)/.exec(this.font), anchor = { center: "middle", right: "end", left: "start" }[this.textAlign];
    const look = { fill: this.fillStyle, "font-size": size, "font-family": "system-ui, sans-serif", "font-weight": weight ? 600 : 400 };
    this.add("text", { x, y: y + parseFloat(size) * 0.35, "text-anchor": anchor, ...look, ...more }, text);
  }

  beginPath() { this.path = ""; }

  moveTo(x, y) { this.path += `M${x.toFixed(2)},${y.toFixed(2)}`; }

  lineTo(x, y) { this.path += `L${x.toFixed(2)},${y.toFixed(2)}`; }

  closePath() { this.path += "Z"; }

  rect(x, y, width, height) { this.box = { x, y, width, height }; }

  clip() {
    const { x, y, width, height } = this.box;
    this.at = shape(this.at, "svg", { ...this.box, viewBox: `${x} ${y} ${width} ${height}` });
  }

  save() { this.stack.push(this.at); }

  restore() { this.at = this.stack.pop(); }

  stroke() { this.add("path", { d: this.path, fill: "none", stroke: this.strokeStyle, "stroke-width": this.lineWidth }); }

  fill() { this.add("path", { d: this.path, fill: this.fillStyle }); }
}

class Panel {
  constructor(parent, title, label) {
    const figure = make(byId(parent), "figure");
    make(make(figure, "figcaption"), "h2", {}, title);
    this.canvas = make(figure, "canvas", { role: "img", tabindex: 0, "aria-label": label });
    addExport(figure, () => this.drawn(), data.about);
    this.canvas.addEventListener("pointermove", (event) => this.move(event));
    this.canvas.addEventListener("pointerdown", (event) => this.grab(event));
    this.canvas.addEventListener("pointerup", (event) => this.release(event));
    this.canvas.addEventListener("pointerleave", () => this.leave());
    this.canvas.addEventListener("dblclick", (event) => zoom(0.25, this.timeAt(event)));
    this.canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    panels.push(this);
  }

  get width() { return Math.max(60, this.canvas.clientWidth - GUTTER - RIGHT); }

  get scale() { return this.width / (view.to - view.from); }

  x(time) { return GUTTER + (time - view.from) * this.scale; }

  timeAt(event) {
    const box = this.canvas.getBoundingClientRect();
    return view.from + (event.clientX - box.left - GUTTER) / this.scale;
  }

  // The picture as an SVG in the colors of paper.
  drawn() {
    document.documentElement.style.colorScheme = "light";
    readColors();
    saved = true;
    this.draw();
    const { root } = saved;
    saved = null;
    document.documentElement.style.colorScheme = "";
    readColors();
    drawAll();
    return root;
  }

  begin(height) {
    this.height = height;
    const wide = this.canvas.clientWidth, real = this.canvas.getContext("2d");
    if (saved) {
      this.pen = saved = new SvgPen(wide, height, real);
    } else {
      const ratio = window.devicePixelRatio || 1;
      this.canvas.style.height = `${height}px`;
      this.canvas.width = Math.round(wide * ratio);
      this.canvas.height = Math.round(height * ratio);
      real.setTransform(ratio, 0, 0, ratio, 0, 0);
      this.pen = real;
    }
    this.pen.font = `${0.86 * em}px system-ui, sans-serif`;
    this.pen.textBaseline = "middle";
    return this.pen;
  }

  // Ticks of the axis at the bottom, from `top` on, and what it is of.
  axis(top) {
    const pen = this.pen, span = view.to - view.from;
    const [unit, name] = unitOf(Math.max(view.to, 1), 1000, TIME_UNITS);
    const step = tickStep(span, this.width / (8 * em), unit);
    const digits = Math.max(0, Math.ceil(-Math.log10(step / unit) - 1e-9));
    const end = GUTTER + this.width;
    pen.textAlign = "center";
    for (let time = Math.ceil(view.from / step) * step; time <= view.to; time += step) {
      const x = Math.round(this.x(time)), text = `${(time / unit).toFixed(digits)} ${name}`;
      pen.fillStyle = colors.line;
      pen.fillRect(x, 0, 1, top + 4);
      pen.fillStyle = colors.quiet;
      const half = pen.measureText(text).width / 2;
      pen.fillText(text, Math.max(GUTTER + half, Math.min(x, end - half)), top + 0.95 * em);
    }
    this.label("time", top + 0.95 * em);
  }

  label(text, y, strong) {
    const pen = this.pen, { font } = pen;
    pen.textAlign = "right";
    pen.fillStyle = strong ? colors.text : colors.quiet;
    if (strong) pen.font = `600 ${font}`;
    if (pen.measureText(text).width > GUTTER - 12) pen.font = pen.font.replace(/[0-9.]+px/, `${0.74 * em}px`);
    pen.fillText(shortened(pen, text, GUTTER - 12), GUTTER - 8, Math.max(y, em / 2));
    pen.font = font;
  }

  line() {
    if (cursor === null || saved || cursor < view.from || cursor > view.to) return;
    this.pen.fillStyle = colors.text;
    this.pen.globalAlpha = 0.55;
    this.pen.fillRect(Math.round(this.x(cursor)), 0, 1, this.height - 1.5 * em);
    this.pen.globalAlpha = 1;
  }

  // -- the pointer

  grab(event) {
    if (event.button) return;
    this.held = { x: event.clientX, from: view.from, to: view.to, moved: false };
    try { this.canvas.setPointerCapture(event.pointerId); } catch { /* a pointer of a script */ }
  }

  release(event) {
    const held = this.held;
    this.held = null;
    if (held && !held.moved) this.click(event);
  }

  click() {}

  move(event) {
    if (this.held) {
      const by = (event.clientX - this.held.x) / this.scale;
      if (Math.abs(event.clientX - this.held.x) > 3) this.held.moved = true;
      if (this.held.moved) look(this.held.from - by, this.held.to - by);
      return;
    }
    this.last = event;
    this.tellHere();
    drawSoon();
  }

  // Says what is under the pointer, after it or the window of time has moved.
  tellHere() {
    if (!this.last) return;
    const time = this.timeAt(this.last), y = this.last.clientY - this.canvas.getBoundingClientRect().top;
    tip.replaceChildren();
    const inside = time >= view.from && time <= view.to && this.tell(time, y);
    if (inside) placeTip(this.last.clientX, this.last.clientY); else hideTip();
    cursor = inside ? time : null;
  }

  leave() {
    this.last = null;
    hideTip();
    cursor = null;
    drawSoon();
  }

  wheel(event) {
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) / 150), this.timeAt(event));
    } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      const by = (event.deltaX || event.deltaY) / this.scale;
      look(view.from + by, view.to + by);
    }
  }
}

function shortened(pen, text, room) {
  if (pen.measureText(text).width <= room) return text;
  let length = text.length;
  while (length > 1 && pen.measureText(`${text.slice(0, length)}…`).width > room) length -= 1;
  return `${text.slice(0, length)}…`;
}

// -- a lane ---------------------------------------------------------------------------------------

// What is narrower than a pixel or so is added up by columns: heights are shares of the time.
class Columns {
  constructor(panel) {
    this.panel = panel;
    this.count = Math.ceil(panel.width);
    this.rows = kinds.map(() => null);
    [this.scale, this.from] = [panel.scale, view.from];
  }

  add(kind, start, end, time) {
    const x0 = (start - this.from) * this.scale, x1 = (end - this.from) * this.scale;
    if (x1 < 0 || x0 >= this.count) return;
    const row = (this.rows[kind] ||= new Float32Array(this.count)), first = x0 > 0 ? Math.floor(x0) : 0;
    const last = Math.min(this.count - 1, Math.floor(x1)), share = time * this.scale;
    row[first] += share < 1e-3 ? 1e-3 : 0;
    if (first === last) { row[first] += x1 > x0 ? (share * (Math.min(x1, first + 1) - Math.max(x0, first))) / (x1 - x0) : share; return; }
    const density = share / (x1 - x0);
    row[first] += density * (first + 1 - Math.max(x0, first));
    for (let i = first + 1; i < last; i += 1) row[i] += density;
    row[last] += density * Math.min(1, x1 - last);
  }

  draw(y, height, least) {
    const pen = this.panel.pen, tops = new Float32Array(this.count);
    this.rows.forEach((row, kind) => {
      if (!row) return;
      pen.fillStyle = colors.kinds[kind];
      for (let i = 0; i < this.count; i += 1) {
        if (row[i] <= 0) continue;
        const from = tops[i], high = Math.min(height - from, Math.max(least, row[i] * height));
        let end = i + 1;
        while (end < this.count && tops[end] === from && Math.abs(row[end] - row[i]) * height < 0.2 && row[end] > 0) end += 1;
        if (high > 0.2) pen.fillRect(GUTTER + i, y + height - from - high, end - i, high);
        for (let k = i; k < end; k += 1) tops[k] = from + high;
        i = end - 1;
      }
    });
  }
}

const lightPart = picture.parts.indexOf("element-wise");
// Forward, weights, and all else of an action, whose parts are one run.
const groupOf = kinds.map((kind) => ["forward", "weights"].indexOf(kind));

function drawLane(panel, lane, stream, y, height, waits) {
  const pen = panel.pen, columns = new Columns(panel), runs = [];
  const rect = (kind, start, end, faint) => {
    const x0 = Math.max(GUTTER, panel.x(start)), x1 = Math.min(GUTTER + panel.width, panel.x(end));
    pen.fillStyle = colors.kinds[kind];
    pen.globalAlpha = faint;
    pen.fillRect(x0, y, Math.max(0.8, x1 - x0 - (x1 - x0 > 4 ? 0.6 : 0)), height);
    pen.globalAlpha = 1;
    return [x0, x1];
  };
  if (waits) {
    const wait = kinds.indexOf("wait");
    for (let i = Math.max(0, lastUpTo(waits.starts, view.from)); i < waits.starts.length && waits.starts[i] < view.to; i += 1) {
      const [start, end] = [waits.starts[i], waits.ends[i]];
      if (end < view.from) continue;
      if ((end - start) * panel.scale < NARROW) columns.add(wait, start, end, end - start); else rect(wait, start, end, 1);
    }
  }
  const found = [];
  for (let i = Math.max(0, lastUpTo(lane.firsts, view.from)); i < lane.firsts.length && lane.firsts[i] < view.to; i += 1) {
    if (lane.lasts[i] < view.from) continue;
    const on = entryOf(lane.entries[i]).streams.get(stream), wide = (lane.lasts[i] - lane.firsts[i]) * panel.scale;
    let named = false;
    if (wide < COARSE) {
      on.shares ||= [...on.share].flat();
      for (let k = 0; k < on.shares.length; k += 2) columns.add(on.shares[k], lane.firsts[i], lane.lasts[i], on.shares[k + 1]);
      if (wanted && on.places.some((place) => wanted[entryOf(lane.entries[i]).nodes[place]])) found.push([lane.firsts[i], lane.lasts[i]]);
    } else named = drawNodes(panel, lane, i, on, columns, rect, y, height, found);
    if (stream === COMPUTE) addRun(panel, runs, lane, i, on, named);
  }
  columns.draw(y, height, stream === COMPUTE ? 0 : 5);
  pen.fillStyle = colors.alarm;
  for (const [start, end] of found) {
    const x0 = Math.max(GUTTER, panel.x(start)), x1 = Math.min(GUTTER + panel.width, panel.x(end));
    pen.fillRect(x0, y - 2, Math.max(2, x1 - x0), 3);
  }
  drawRuns(panel, runs, y, height);
}

// Pieces of one action and one microbatch that follow each other are a run.
function addRun(panel, runs, lane, i, on, named) {
  if (on.kind === undefined) on.kind = [...on.share].reduce((most, each) => (each[1] > most[1] ? each : most))[0];
  const last = runs[runs.length - 1], numbers = lane.microbatches[i], group = groupOf[on.kind];
  const near = last && (lane.firsts[i] - last.to) * panel.scale < 3;
  if (near && last.numbers === numbers && last.group === group) {
    last.to = lane.lasts[i];
    last.named ||= named;
  } else runs.push({ numbers, group, kind: on.kind, from: lane.firsts[i], to: lane.lasts[i], named });
}

function drawRuns(panel, runs, y, height) {
  const pen = panel.pen, right = GUTTER + panel.width;
  pen.textAlign = "center";
  for (const run of runs) {
    const x0 = Math.max(GUTTER, panel.x(run.from)), x1 = Math.min(right, panel.x(run.to));
    if (x1 - x0 < 5) continue;
    pen.fillStyle = colors.back;
    if (x0 > GUTTER) pen.fillRect(Math.round(x0), y, 0.8, height);
    const text = picture.microbatches[run.numbers].join("+");
    if (!text || run.named || run.kind > 3 || height < em || pen.measureText(text).width > x1 - x0 - 3) continue;
    pen.fillStyle = colors.inks[run.kind];
    pen.strokeStyle = colors.kinds[run.kind];
    pen.lineWidth = 4;
    pen.strokeText(text, (x0 + x1) / 2, y + height / 2 + 0.5);
    pen.fillText(text, (x0 + x1) / 2, y + height / 2 + 0.5);
  }
}

// Draws the nodes of a piece, and says whether names are in it.
function drawNodes(panel, lane, piece, on, columns, rect, y, height, found) {
  const pen = panel.pen, entry = entryOf(lane.entries[piece]), base = lane.bases[piece];
  let named = false;
  for (const place of on.places) {
    const start = base + entry.starts[place], end = base + entry.ends[place];
    if (end < view.from) continue;
    if (start > view.to) break;
    const row = picture.nodes[entry.nodes[place]], wide = (end - start) * panel.scale, hit = wanted && wanted[entry.nodes[place]];
    if (hit) found.push([start, end]);
    if (wide < NARROW) { columns.add(row[KIND], start, end, end - start); continue; }
    const [x0, x1] = rect(row[KIND], start, end, wanted && !hit ? 0.3 : row[PART] === lightPart ? 0.7 : 1);
    if (x1 - x0 < NAMED || height < 12 || !row[TITLE] || (wanted && !hit)) continue;
    named = true;
    pen.fillStyle = colors.inks[row[KIND]];
    pen.textAlign = "left";
    pen.fillText(shortened(pen, row[TITLE].split("/").pop(), x1 - x0 - 7), x0 + 4, y + height / 2 + 0.5);
  }
  return named;
}
