// Pictures of `stagec time --html` on one axis of time: a canvas with a row for each lane.

const GUTTER = 140, RIGHT = 12, NARROW = 1.3, COARSE = 40;
const view = { from: 0, to: picture.step };
const panels = [];
let cursor = null;

const style = () => getComputedStyle(document.documentElement);
const kindColor = (kind) => style().getPropertyValue(`--k-${kinds[kind]}`).trim();
let colors = {};
function readColors() {
  const now = style(), of = (name) => now.getPropertyValue(name).trim();
  colors = { kinds: kinds.map((kind) => of(`--k-${kind}`)) };
  for (const name of ["back", "text", "quiet", "line", "mark", "idle", "path", "memory", "static", "inside", "alarm"]) colors[name] = of(`--${name}`);
}

class Panel {
  constructor(parent, label) {
    this.canvas = make(parent, "canvas", { role: "img", tabindex: 0, "aria-label": label });
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

  begin(height) {
    const ratio = window.devicePixelRatio || 1;
    this.height = height;
    this.canvas.style.height = `${height}px`;
    this.canvas.width = Math.round(this.canvas.clientWidth * ratio);
    this.canvas.height = Math.round(height * ratio);
    const pen = this.canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, this.canvas.clientWidth, height);
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    return (this.pen = pen);
  }

  // Ticks of the axis at the bottom, from `top` on.
  axis(top) {
    const pen = this.pen, span = view.to - view.from;
    const [unit, name] = unitOf(Math.max(view.to, 1), 1000, ["ps", "ns", "µs", "ms", "s"]);
    const step = tickStep(span, this.width / 110, unit);
    const digits = Math.max(0, Math.ceil(-Math.log10(step / unit) - 1e-9));
    pen.fillStyle = colors.quiet;
    pen.textAlign = "center";
    for (let time = Math.ceil(view.from / step) * step; time <= view.to; time += step) {
      const x = Math.round(this.x(time));
      pen.fillStyle = colors.line;
      pen.fillRect(x, 0, 1, top + 4);
      pen.fillStyle = colors.quiet;
      pen.fillText(`${(time / unit).toFixed(digits)} ${name}`, Math.min(x, this.canvas.clientWidth - 24), top + 13);
    }
  }

  label(text, y, strong) {
    const pen = this.pen;
    pen.textAlign = "right";
    pen.fillStyle = strong ? colors.text : colors.quiet;
    pen.font = `${strong ? "600 " : ""}12px system-ui, sans-serif`;
    pen.fillText(shortened(pen, text, GUTTER - 12), GUTTER - 8, y);
    pen.font = "12px system-ui, sans-serif";
  }

  line() {
    if (cursor === null || cursor < view.from || cursor > view.to) return;
    this.pen.fillStyle = colors.mark;
    this.pen.globalAlpha = 0.55;
    this.pen.fillRect(Math.round(this.x(cursor)), 0, 1, this.height - 20);
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
    const time = this.timeAt(event);
    const y = event.clientY - this.canvas.getBoundingClientRect().top;
    tip.replaceChildren();
    const inside = time >= view.from && time <= view.to && this.tell(time, y);
    if (inside) placeTip(event.clientX, event.clientY); else tip.hidden = true;
    cursor = inside ? time : null;
    drawSoon();
  }

  leave() {
    tip.hidden = true;
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
    this.rows = new Map();
  }

  add(kind, start, end, time) {
    const panel = this.panel, x0 = panel.x(start) - GUTTER, x1 = Math.max(x0 + 1e-6, panel.x(end) - GUTTER);
    if (x1 < 0 || x0 >= this.count) return;
    let row = this.rows.get(kind);
    if (!row) this.rows.set(kind, (row = new Float32Array(this.count)));
    const density = (time * panel.scale) / (x1 - x0);
    const first = Math.max(0, Math.floor(x0)), last = Math.min(this.count - 1, Math.floor(x1));
    for (let i = first; i <= last; i += 1) row[i] += density * Math.max(0, Math.min(x1, i + 1) - Math.max(x0, i));
    if (time * panel.scale < 1e-3) row[first] += 1e-3;
  }

  draw(y, height, least) {
    const pen = this.panel.pen, tops = new Float32Array(this.count);
    const order = [...this.rows.keys()].sort((a, b) => a - b);
    for (const kind of order) {
      const row = this.rows.get(kind);
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
    }
  }
}

const lightPart = picture.parts.indexOf("element-wise");

function drawLane(panel, lane, stream, y, height, waits) {
  const pen = panel.pen, columns = new Columns(panel), marks = [];
  const rect = (kind, start, end, faint) => {
    const x0 = Math.max(GUTTER, panel.x(start)), x1 = Math.min(GUTTER + panel.width, panel.x(end));
    pen.fillStyle = colors.kinds[kind];
    pen.globalAlpha = faint ? 0.6 : 1;
    pen.fillRect(x0, y, Math.max(0.8, x1 - x0 - (x1 - x0 > 4 ? 0.6 : 0)), height);
    pen.globalAlpha = 1;
    return [x0, x1];
  };
  if (waits) {
    const wait = kinds.indexOf("wait");
    for (let i = Math.max(0, lastUpTo(waits.starts, view.from)); i < waits.starts.length && waits.starts[i] < view.to; i += 1) {
      const [start, end] = [waits.starts[i], waits.ends[i]];
      if (end < view.from) continue;
      if ((end - start) * panel.scale < NARROW) columns.add(wait, start, end, end - start); else rect(wait, start, end);
    }
  }
  for (let i = Math.max(0, lastUpTo(lane.firsts, view.from)); i < lane.firsts.length && lane.firsts[i] < view.to; i += 1) {
    if (lane.lasts[i] < view.from) continue;
    const on = entryOf(lane.entries[i]).streams.get(stream), wide = (lane.lasts[i] - lane.firsts[i]) * panel.scale;
    if (wide < COARSE) {
      for (const [kind, time] of on.share) columns.add(kind, lane.firsts[i], lane.lasts[i], time);
      if (stream === COMPUTE && wide > 5 && on.places.length > 1) marks.push(i);
    } else drawNodes(panel, lane, i, on, columns, rect, y, height);
  }
  columns.draw(y, height, stream === COMPUTE ? 0 : 5);
  pen.textAlign = "center";
  for (const i of marks) {
    const x0 = panel.x(lane.firsts[i]), x1 = panel.x(lane.lasts[i]);
    pen.fillStyle = colors.back;
    if (x0 > GUTTER) pen.fillRect(Math.round(x0), y, 0.7, height);
    const text = microbatchesOf(lane, i).join("+");
    pen.fillStyle = colors.inside;
    if (text && height >= 14 && pen.measureText(text).width < x1 - x0 - 3 && x0 > GUTTER && x1 < GUTTER + panel.width) pen.fillText(text, (x0 + x1) / 2, y + height / 2 + 0.5);
  }
}

function drawNodes(panel, lane, piece, on, columns, rect, y, height) {
  const pen = panel.pen, entry = entryOf(lane.entries[piece]), base = lane.bases[piece];
  for (const place of on.places) {
    const start = base + entry.starts[place], end = base + entry.ends[place];
    if (end < view.from) continue;
    if (start > view.to) break;
    const row = picture.nodes[entry.nodes[place]], wide = (end - start) * panel.scale;
    if (wide < NARROW) { columns.add(row[KIND], start, end, end - start); continue; }
    const [x0, x1] = rect(row[KIND], start, end, row[PART] === lightPart);
    if (x1 - x0 < 24 || height < 12 || !row[TITLE]) continue;
    pen.fillStyle = colors.inside;
    pen.textAlign = "left";
    pen.fillText(shortened(pen, row[TITLE].split("/").pop(), x1 - x0 - 7), x0 + 4, y + height / 2 + 0.5);
  }
}
