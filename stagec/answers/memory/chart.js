// A chart of `stagec memory --html`: the bytes of one rank over a step. `off` and `byTime` are those of
// the page.js beside it, all else that it does not make is of that of all pages.

const swatch = (parent, category) => colored(parent, `var(--c${data.colors[category]})`);
const PHASES = { forward: 0, backward: 2, weights: 7, recompute: 5, gradient: 4, optimizer: 6 };

// -- a chart --------------------------------------------------------------------------------------

class Chart {
  constructor(parent, entry, alone, about, most) {
    this.entry = decoded(entry);
    this.room = most;
    this.alone = alone;
    this.pinned = null;
    this.box = make(parent, "figure");
    this.head = make(make(this.box, "figcaption"), "span", { class: "quiet" });
    addExport(this.box, () => this.drawn(), about);
    this.svg = shape(this.box, "svg", { tabindex: 0, role: "img", class: "chart" });
    const more = make(this.box, "details", alone ? { open: "" } : {});
    this.caption = make(more, "summary");
    this.table = make(make(more, "div", { class: "rows", tabindex: 0, role: "group", "aria-label": "largest buffers" }), "table");
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.leave());
    this.svg.addEventListener("click", (event) => { this.pin(this.columnAt(event)); });
    this.svg.addEventListener("keydown", (event) => this.key(event));
    this.measure();
  }

  // What depends on the categories that are switched on.
  measure() {
    this.bands = shownBands(this.entry);
    this.sums = totals(this.entry, this.bands);
    this.peak = highest(this.sums);
    this.most = this.sums[this.peak];
  }

  get length() { return byTime ? this.entry.time : this.entry.starts.length; }

  edge(column) {
    if (!byTime) return column;
    return column < this.entry.starts.length ? this.entry.starts[column] : this.entry.time;
  }

  // The picture as a file: without the cursor.
  drawn() {
    this.over.replaceChildren();
    return standalone(this.svg);
  }

  x(column) { return this.left + (this.edge(column) / this.across) * this.width; }

  y(value) { return this.top + this.height - (value / this.upTo) * this.height; }

  draw(upTo, across) {
    this.upTo = upTo;
    this.across = across;
    const wide = this.svg.clientWidth || this.box.clientWidth, height = this.alone ? 460 : 290;
    this.zoom = parseFloat(getComputedStyle(document.documentElement).fontSize) / 14;
    const whole = wide / this.zoom;
    this.low = whole < 520 ? 18 : 0;
    [this.left, this.top] = [58, 44];
    this.width = Math.max(80, whole - this.left - 14);
    this.height = height - this.top - 62 - this.low;
    this.svg.replaceChildren();
    this.svg.setAttribute("viewBox", `0 0 ${whole} ${height}`);
    this.svg.setAttribute("height", height * this.zoom);
    const at = whatRuns(this.entry, this.peak);
    const about = `${this.entry.name}: peak ${bytesText(this.most)} (${exact(this.most)} bytes) in ${at}`;
    this.svg.setAttribute("aria-label", about);
    this.head.textContent = off.size ? `${about}; of the categories that are switched on` : about;
    this.grid();
    this.areas();
    this.phases();
    this.limit();
    this.mark(at);
    this.line = shape(this.svg, "line", { class: "cursor", y1: this.top, y2: this.top + this.height });
    this.over = shape(this.svg, "g");
    this.list(this.pinned === null ? this.peak : this.pinned);
  }

  grid() {
    const [unit, name] = unitOf(this.upTo, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]);
    const step = tickStep(this.upTo, this.height / 34, unit);
    for (let value = 0; value <= this.upTo; value += step) {
      const y = Math.round(this.y(value));
      shape(this.svg, "line", { class: value ? "grid" : "axis", x1: this.left, x2: this.left + this.width, y1: y, y2: y });
      shape(this.svg, "text", { class: "quiet", x: this.left - 6, y: y + 4, "text-anchor": "end" }, `${+(value / unit).toFixed(2)}`);
    }
    shape(this.svg, "text", { class: "quiet", x: 4, y: this.top - 28 }, `memory per rank, ${name}`);
    const bottom = this.top + this.height + 10;
    const [tick, unitName] = byTime ? unitOf(this.across, 1000, ["ps", "ns", "us", "ms", "s"]) : [1, ""];
    const wide = tickStep(this.across, this.width / 90, tick);
    for (let value = 0; value <= this.across; value += wide) {
      const x = Math.round(this.left + (value / this.across) * this.width);
      shape(this.svg, "line", { class: "axis", x1: x, x2: x, y1: bottom, y2: bottom + 4 });
      shape(this.svg, "text", { class: "quiet", x, y: bottom + 17, "text-anchor": "middle" }, `${+(value / tick).toFixed(2)}`);
    }
    const label = byTime ? `time of the computations of a step, ${unitName}` : "columns in the order of the step";
    shape(this.svg, "text", { class: "quiet", x: this.left, y: bottom + 36 }, label);
  }

  // The lower and upper edges of what is stacked from one band to before another one.
  outline(lower, upper) {
    const count = lower.length, there = [], back = [];
    let start = null;
    const paths = [];
    const flush = (end) => {
      const x1 = this.x(end);
      paths.push(`M${there.join("L")}L${x1},${this.y(upper[end - 1]).toFixed(1)}L${x1},${this.y(lower[end - 1]).toFixed(1)}L${back.reverse().join("L")}Z`);
      there.length = back.length = 0;
      start = null;
    };
    for (let i = 0; i < count; i += 1) {
      if (upper[i] <= lower[i]) { if (start !== null) flush(i); continue; }
      const x = this.x(i).toFixed(1);
      if (start === null || upper[i] !== upper[i - 1]) {
        if (start !== null) there.push(`${x},${this.y(upper[i - 1]).toFixed(1)}`);
        there.push(`${x},${this.y(upper[i]).toFixed(1)}`);
      }
      if (start === null || lower[i] !== lower[i - 1]) {
        if (start !== null) back.push(`${x},${this.y(lower[i - 1]).toFixed(1)}`);
        back.push(`${x},${this.y(lower[i]).toFixed(1)}`);
      }
      if (start === null) start = i;
    }
    if (start !== null) flush(count);
    return paths.join("");
  }

  areas() {
    const count = this.entry.starts.length;
    let lower = new Float64Array(count), category = null, first = lower;
    const seams = [];
    this.edges = new Map();
    const fill = (upper) => {
      if (category !== null) {
        shape(this.svg, "path", { d: this.outline(first, upper), class: `f${data.colors[category]}`, "data-category": data.categories[category] });
      }
    };
    for (const k of this.bands) {
      const band = this.entry.bands[k];
      if (band.category !== category) { fill(lower); category = band.category; first = lower; }
      const upper = lower.map((value, i) => value + this.entry.rows[k][i]);
      this.edges.set(k, [lower, upper]);
      if (Math.max(...this.entry.rows[k]) > this.upTo / 40) seams.push(k);
      lower = upper;
    }
    fill(lower);
    for (const k of seams) shape(this.svg, "path", { class: "seam", d: this.outline(...this.edges.get(k)) });
    for (const k of words.length ? this.bands : []) {
      if (isWanted(this.entry.bands[k])) shape(this.svg, "path", { class: "hit", d: this.outline(...this.edges.get(k)) });
    }
  }

  phases() {
    const y = this.top + this.height + 1, { what, texts } = this.entry;
    const phase = (i) => texts[what[i]][2];
    for (let i = 0, from = 0; i < what.length; i += 1) {
      if (i + 1 < what.length && phase(i + 1) === phase(from)) continue;
      const [x1, x2] = [this.x(from), this.x(i + 1)];
      if (phase(from) && x2 > x1) shape(this.svg, "rect", { class: `f${PHASES[phase(from)] ?? 6}`, x: x1, y, width: x2 - x1, height: 7 });
      from = i + 1;
    }
    let x = this.left + this.width;
    const names = [...new Set(what.map((_, i) => phase(i)).filter(Boolean))];
    for (const name of names.reverse()) {
      const text = shape(this.svg, "text", { class: "quiet", x, y: y + 45 + this.low, "text-anchor": "end" }, name);
      x -= text.getComputedTextLength() + 14;
      shape(this.svg, "rect", { class: `f${PHASES[name] ?? 6}`, x, y: y + 36 + this.low, width: 10, height: 10 });
      x -= 10;
    }
  }

  limit() {
    if (this.room === null) return;
    const text = `limit ${bytesText(this.room)}`, right = this.left + this.width;
    if (this.room > this.upTo) {
      shape(this.svg, "text", { class: "alarm strong halo limit-text", x: right, y: this.top - 28, "text-anchor": "end" }, `${text}, above the axis`);
      return;
    }
    const y = this.y(this.room);
    shape(this.svg, "line", { class: "limit", x1: this.left, x2: right, y1: y, y2: y });
    shape(this.svg, "text", { class: "alarm strong halo limit-text", x: right, y: y - 5, "text-anchor": "end" }, text);
  }

  mark(at) {
    const middle = (this.x(this.peak) + this.x(this.peak + 1)) / 2, y = this.y(this.most);
    const part = (middle - this.left) / this.width;
    const anchor = part < 0.35 ? "start" : part > 0.65 ? "end" : "middle";
    shape(this.svg, "circle", { class: "peak", cx: middle, cy: y, r: 4 });
    const place = { x: middle, "text-anchor": anchor };
    const name = shape(this.svg, "text", { ...place, class: "halo", y: y - 9 }, at);
    const room = { start: 1 - part, end: part, middle: 2 * Math.min(part, 1 - part) }[anchor];
    const fits = name.getComputedTextLength() < room * this.width;
    if (!fits) name.remove();
    shape(this.svg, "text", { ...place, class: "strong halo peak-text", y: y - (fits ? 23 : 9) }, `peak ${bytesText(this.most)}`);
  }

  // -- under the pointer

  columnAt(event) {
    const box = this.svg.getBoundingClientRect();
    const wanted = (((event.clientX - box.left) / this.zoom - this.left) / this.width) * this.across;
    let low = 0, high = this.entry.starts.length - 1;
    while (low < high) {
      const middle = Math.ceil((low + high) / 2);
      if (this.edge(middle) <= wanted) low = middle; else high = middle - 1;
    }
    return low;
  }

  bandAt(column, y) {
    return this.bands.find((k) => {
      const [lower, upper] = this.edges.get(k);
      return upper[column] > lower[column] && y <= this.y(lower[column]) && y >= this.y(upper[column]);
    });
  }

  point(event) {
    const column = this.columnAt(event);
    const band = this.bandAt(column, (event.clientY - this.svg.getBoundingClientRect().top) / this.zoom);
    this.show(column, band, event.clientX, event.clientY);
  }

  show(column, band, x, y) {
    this.over.replaceChildren();
    const middle = (this.x(column) + this.x(column + 1)) / 2;
    shape(this.over, "line", { class: "cursor", x1: middle, x2: middle, y1: this.top, y2: this.top + this.height });
    tip.replaceChildren();
    if (band !== undefined) {
      shape(this.over, "path", { class: "hit", d: this.outline(...this.edges.get(band)) });
      this.tellBand(column, band);
    }
    const rest = make(tip, "div", { class: "rest" });
    make(rest, "div", {}, whatRuns(this.entry, column));
    make(rest, "div", {}, `${bytesText(this.sums[column])} in all, ${timeText(this.entry.starts[column])} after the start`);
    placeTip(x, y);
  }

  tellBand(column, number) {
    const band = this.entry.bands[number], bytes = this.entry.rows[number][column], count = bytes / band.each;
    const title = make(tip, "div");
    swatch(title, band.category);
    make(title, "b", {}, ` ${band.line || band.type ? "%" : ""}${band.name}`);
    title.append(` ${data.categories[band.category]}`);
    const each = band.type && count > 1 ? `${count} × ${bytesText(band.each)} = ` : "";
    make(tip, "div", {}, `${each}${bytesText(bytes)} (${exact(bytes)} bytes)`);
    if (band.line) make(tip, "div", {}, `made at ${band.line}`);
    if (band.type) make(make(tip, "div"), "code", {}, band.type);
  }

  leave() {
    hideTip();
    this.over.replaceChildren();
  }

  pin(column) {
    this.pinned = column;
    rememberMoment(this);
    this.list(column === null ? this.peak : column);
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") { this.pin(null); this.leave(); }
    if (!step) return;
    event.preventDefault();
    const now = this.pinned === null ? this.peak : this.pinned;
    this.pin(Math.min(this.entry.starts.length - 1, Math.max(0, now + step)));
    const box = this.svg.getBoundingClientRect();
    this.show(this.pinned, undefined, box.left + this.x(this.pinned) * this.zoom, box.top + this.y(this.sums[this.pinned]) * this.zoom);
  }

  list(column) {
    const x = (this.x(column) + this.x(column + 1)) / 2;
    fill(this.line, { x1: x, x2: x, visibility: this.pinned === null ? "hidden" : "visible" });
    const where = column === this.peak ? "at the peak" : `${timeText(this.entry.starts[column])} after the start`;
    this.caption.textContent = `Largest buffers ${where}, in ${whatRuns(this.entry, column)}`;
    this.table.replaceChildren();
    const head = make(make(this.table, "thead"), "tr");
    for (const name of ["value", "category", "made at", "of type"]) make(head, "th", {}, name);
    for (const name of ["each", "count", "bytes"]) make(head, "th", { class: "number" }, name);
    const body = make(this.table, "tbody"), { rows, bands } = this.entry;
    const there = this.bands.filter((k) => rows[k][column] > 0 && isWanted(bands[k])).sort((a, b) => rows[b][column] - rows[a][column]);
    for (const k of there.slice(0, 12)) {
      const band = bands[k], line = make(body, "tr"), name = make(line, "td");
      swatch(name, band.category);
      name.append(` ${band.type ? "%" : ""}${band.name}`);
      make(line, "td", {}, data.categories[band.category]);
      make(line, "td", {}, band.line);
      make(make(line, "td"), "code", {}, band.type);
      const each = band.type ? [bytesText(band.each), exact(rows[k][column] / band.each)] : ["", ""];
      for (const text of [...each, bytesText(rows[k][column])]) make(line, "td", { class: "number" }, text);
    }
  }
}
