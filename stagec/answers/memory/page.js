// The page of `stagec memory --html`: its data, its controls, and a chart (chart.js, which stands before
// this script) for each rank class that is shown.
const off = new Set();
const charts = [];
let byTime = state.get("widths") !== "column";
let words = [];

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

const isWanted = (band) => words.every((word) => `${band.name} ${band.line} ${band.type}`.toLowerCase().includes(word));

// -- the page -------------------------------------------------------------------------------------

// All pictures have the same scales, so that they can be compared.
function redraw() {
  hideTip();
  for (const chart of charts) chart.measure();
  const most = Math.max(...charts.map((chart) => chart.most), 1);
  const limits = charts.map((chart) => chart.room).filter((room) => room !== null && room < 4 * most);
  const upTo = 1.04 * Math.max(most, ...limits);
  const longest = Math.max(...charts.map((chart) => chart.length), 1);
  for (const chart of charts) chart.draw(upTo, byTime ? longest : chart.length);
}

// -- the moment that is shown -----------------------------------------------------------------------

// What computes on a rank of a class, in the columns of its chart.
function runsOf(entry) {
  return entry.what.flatMap((what, i) => {
    const phase = MOMENT_PHASES[entry.texts[what][2]];
    return phase ? [[phase, entry.starts[i], i + 1 < entry.starts.length ? entry.starts[i + 1] : entry.time]] : [];
  });
}

function momentOf({ entry }, column) {
  return momentAt(runsOf(entry), (entry.starts[column] + (entry.starts[column + 1] ?? entry.time)) / 2);
}

function rememberMoment(chart) {
  remember("class", chart.entry.name);
  remember("at", chart.pinned === null ? null : momentOf(chart, chart.pinned));
}

// Pins the moment in the address, of the first chart of its class.
function pinMoment() {
  const chart = charts.find((each) => isClass(each.entry.name, state.get("class"))), moment = state.get("at");
  const time = chart && moment ? timeOf(runsOf(chart.entry), moment) : null;
  if (time !== null) chart.pinned = Math.max(0, chart.entry.starts.findLastIndex((start) => start < time));
}

placeHere = () => {
  const chart = charts.find((each) => each.pinned !== null) || charts[0];
  return { class: chart.entry.name, at: momentOf(chart, chart.pinned === null ? chart.peak : chart.pinned) };
};

function refresh() {
  charts.length = 0;
  const sections = data.jobs.map((job) => job.choice.value === "all" ? job.classes : job.classes.filter((entry) => entry.name === job.choice.value));
  const alone = sections.flat().length === 1;
  data.jobs.forEach((job, j) => {
    job.place.replaceChildren();
    for (const entry of sections[j]) charts.push(new Chart(job.place, entry, alone, [job.title, job.command], job.limit));
  });
  pinMoment();
  redraw();
}

function addCommand(section, text, about) {
  const box = make(section, "div", { class: "command" });
  if (about) make(box, "span", {}, about);
  make(box, "code", {}, text);
  addCopy(box);
}

function addJob(job, number) {
  const section = make(byId("jobs"), "section");
  make(section, "h2", {}, job.title);
  job.choice = make(section, "select", { "aria-label": "rank class" });
  job.classes.forEach((entry) => {
    const ranks = `${entry.ranks} rank${entry.ranks === 1 ? "" : "s"}`;
    make(job.choice, "option", { value: entry.name }, `${entry.name}: ${ranks}, peak ${bytesText(entry.peak)}`);
  });
  if (job.classes.length > 1) make(job.choice, "option", { value: "all" }, `all ${job.classes.length} stages`);
  const asked = job.classes.find((entry) => isClass(entry.name, state.get("class")));
  job.choice.value = state.get(`class${number}`) || (asked || job.classes[job.shown]).name;
  if (job.choice.selectedIndex < 0) job.choice.selectedIndex = job.shown;
  job.choice.addEventListener("change", () => { remember(`class${number}`, job.choice.value); refresh(); });
  addCommand(section, job.command);
  if (job.time) addCommand(section, job.time, "over the time of the step: ");
  job.place = make(section, "div");
}

function addControls() {
  const form = byId("controls"), hidden = (state.get("off") || "").split(",");
  form.addEventListener("submit", (event) => event.preventDefault());
  data.categories.forEach((name, number) => {
    const label = make(form, "label", { class: "pick" });
    const box = make(label, "input", { type: "checkbox", "data-category": name });
    box.checked = !hidden.includes(name);
    if (!box.checked) off.add(number);
    swatch(label, number);
    label.append(name);
    box.addEventListener("change", () => {
      if (box.checked) off.delete(number); else off.add(number);
      remember("off", [...off].map((n) => data.categories[n]).join(","));
      redraw();
    });
  });
  const find = make(form, "input", { type: "search", placeholder: "search for a buffer", "aria-label": "search for a buffer" });
  find.value = state.get("find") || "";
  const look = () => { words = find.value.toLowerCase().split(/\s+/).filter(Boolean); };
  look();
  find.addEventListener("input", () => { look(); remember("find", find.value); redraw(); });
  const label = make(form, "label", { class: "last" }, "widths by ");
  const choice = make(label, "select", { id: "widths" });
  make(choice, "option", { value: "time" }, "time");
  make(choice, "option", { value: "column" }, "column");
  choice.value = byTime ? "time" : "column";
  choice.addEventListener("change", () => { byTime = choice.value === "time"; remember("widths", choice.value); redraw(); });
}

addControls();
data.jobs.forEach(addJob);
refresh();
addEventListener("resize", redraw);
