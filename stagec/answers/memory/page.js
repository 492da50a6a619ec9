// The page of `stagec memory --html`: its data, its controls, and a chart (memory_chart.js, which
// stands before this script) for each rank class that is shown.
const off = new Set();
const charts = [];
let byTime = true;

// -- data -----------------------------------------------------------------------------------------

// What the page holds of a class as differences becomes rows: starts of columns, a number of buffers
// for each band and column.
function decoded(entry) {
  if (entry.rows) return entry;
  let now = 0;
  entry.starts = entry.starts.map((step) => (now += step));
  const count = entry.starts.length;
  entry.rows = entry.bands.map((band) => {
    const row = new Float64Array(count);
    for (let k = 0, at = 0; k < band.changes.length; k += 2) {
      at += band.changes[k];
      row.fill(band.changes[k + 1] * band.each, at);
    }
    return row;
  });
  return entry;
}

const shownBands = (entry) => entry.bands.map((_, k) => k).filter((k) => !off.has(entry.bands[k].category));

function totals(entry, bands) {
  const sums = new Float64Array(entry.starts.length);
  for (const k of bands) entry.rows[k].forEach((value, i) => { sums[i] += value; });
  return sums;
}

const highest = (sums) => sums.reduce((best, value, i) => (value > sums[best] ? i : best), 0);

function whatRuns(entry, column) {
  const [title, operation] = entry.texts[entry.what[column]];
  return [title, operation].filter(Boolean).join(": ") || "the rank waits";
}

// -- the page -------------------------------------------------------------------------------------

// All pictures have the same scales, so that they can be compared.
function redraw() {
  tip.hidden = true;
  for (const chart of charts) chart.measure();
  const most = Math.max(...charts.map((chart) => chart.most), 1);
  const upTo = 1.04 * (data.limit !== null && data.limit < 3 * most ? Math.max(most, data.limit) : most);
  const longest = Math.max(...charts.map((chart) => chart.length), 1);
  for (const chart of charts) chart.draw(upTo, byTime ? longest : chart.length);
}

function refresh() {
  charts.length = 0;
  const sections = data.jobs.map((job) => job.choice.value === "all" ? job.classes : [job.classes[job.choice.value]]);
  const alone = sections.flat().length === 1;
  data.jobs.forEach((job, j) => {
    job.place.replaceChildren();
    for (const entry of sections[j]) charts.push(new Chart(job.place, entry, alone));
  });
  redraw();
}

function addJob(job) {
  const section = make(document.getElementById("jobs"), "section", { class: "job" });
  const header = make(section, "header");
  make(header, "h2", {}, job.title);
  job.choice = make(header, "select", { "aria-label": "rank class" });
  job.classes.forEach((entry, number) => {
    const ranks = `${entry.ranks} rank${entry.ranks === 1 ? "" : "s"}`;
    make(job.choice, "option", { value: number }, `${entry.name}: ${ranks}, peak ${bytesText(entry.peak)}`);
  });
  if (job.classes.length > 1) make(job.choice, "option", { value: "all" }, `all ${job.classes.length} stages`);
  job.choice.value = job.shown;
  job.choice.addEventListener("change", refresh);
  make(make(section, "div"), "code", {}, job.command);
  job.place = make(section, "div");
}

function addControls() {
  const form = document.getElementById("controls");
  data.categories.forEach((name, number) => {
    const label = make(form, "label");
    const box = make(label, "input", { type: "checkbox", checked: "", "data-category": name });
    swatch(label, number);
    label.append(name);
    box.addEventListener("change", () => { if (box.checked) off.delete(number); else off.add(number); redraw(); });
  });
  make(form, "span", { class: "gap" });
  const label = make(form, "label", {}, "widths by ");
  const choice = make(label, "select", { id: "widths" });
  make(choice, "option", { value: "time" }, "time");
  make(choice, "option", { value: "column" }, "column");
  choice.addEventListener("change", () => { byTime = choice.value === "time"; redraw(); });
}

addControls();
data.jobs.forEach(addJob);
refresh();
addEventListener("resize", redraw);
