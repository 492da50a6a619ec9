// What all pages have in common. All text from the data becomes text nodes, never markup.
const data = JSON.parse(document.getElementById("data").textContent);
const tip = document.getElementById("tip");
const svgSpace = document.getElementById("shape").namespaceURI;
const byId = (id) => document.getElementById(id);
const all = (what, within) => [...(within || document).querySelectorAll(what)];

// -- elements -------------------------------------------------------------------------------------

function fill(node, attributes, text) {
  for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

function make(parent, tag, attributes, text) {
  const node = fill(document.createElement(tag), attributes, text);
  parent.append(node);
  return node;
}

function shape(parent, tag, attributes, text) {
  const node = fill(document.createElementNS(svgSpace, tag), attributes, text);
  parent.append(node);
  return node;
}

function button(parent, text, about, action) {
  const node = make(parent, "button", { type: "button", "aria-label": about, title: about }, text);
  node.addEventListener("click", action);
  return node;
}

function colored(parent, color) { make(parent, "i", { class: "swatch" }).style.background = color; }

// -- numbers --------------------------------------------------------------------------------------

function scaled(value, base, units) {
  let unit = 0;
  while (Math.abs(value) >= base && unit < units.length - 1) { value /= base; unit += 1; }
  return unit ? `${value.toFixed(2)} ${units[unit]}` : `${value} ${units[0]}`;
}

const BYTE_UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"], TIME_UNITS = ["ps", "ns", "us", "ms", "s"];
const bytesText = (value) => scaled(value, 1024, BYTE_UNITS);
const exact = (value) => value.toLocaleString("en-US");
const timeText = (value) => scaled(value, 1000, TIME_UNITS);

// The distance of about `wanted` round ticks up to `most`, in multiples of `unit`.
function tickStep(most, wanted, unit) {
  const rough = most / unit / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  return unit * power * [1, 2, 5, 10].find((n) => n * power >= rough);
}

function unitOf(most, base, names) {
  let unit = 1, at = 0;
  while (most >= 2 * unit * base && at < names.length - 1) { unit *= base; at += 1; }
  return [unit, names[at]];
}

// -- the state of the page, in its address --------------------------------------------------------

const state = new URLSearchParams(location.hash.slice(1));
let saving = 0;
function remember(name, value) {
  if (value === null || value === undefined || value === "") state.delete(name); else state.set(name, value);
  clearTimeout(saving);
  saving = setTimeout(() => history.replaceState(null, "", `#${state}`), 200);
}
addEventListener("hashchange", () => location.reload());

// -- the tip --------------------------------------------------------------------------------------

// Shows the tip beside the pointer, inside the window.
function placeTip(x, y) {
  tip.hidden = false;
  const wide = tip.offsetWidth, high = tip.offsetHeight;
  tip.style.left = `${Math.max(8, x + 16 + wide > innerWidth ? x - wide - 16 : x + 16)}px`;
  tip.style.top = `${Math.max(8, Math.min(y + 14, innerHeight - high - 8))}px`;
}

function hideTip() { tip.hidden = true; }
addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });

// -- marks of charts ------------------------------------------------------------------------------

// A mark says what it is under the pointer and for keys; what is covered by it is named too.
const marks = new Set();
for (const title of all("svg title")) {
  const mark = title.parentNode;
  mark.dataset.tip = title.textContent;
  title.remove();
  marks.add(mark);
}

function point(mark, x, y) {
  for (const other of all(".pointed")) other.classList.remove("pointed");
  mark.classList.add("pointed");
  const here = document.elementsFromPoint(x, y).filter((node) => marks.has(node));
  const texts = [...new Set([mark, ...here].map((node) => node.dataset.tip))];
  tip.textContent = texts.slice(0, 6).join("\n") + (texts.length > 6 ? `\nand ${texts.length - 6} others here` : "");
  placeTip(x, y);
}

function unpoint() {
  for (const other of all(".pointed")) other.classList.remove("pointed");
  hideTip();
}

for (const svg of all("figure > svg")) {
  const own = all("*", svg).filter((node) => marks.has(node));
  if (!own.length) continue;
  fill(svg, { tabindex: 0, "aria-roledescription": "chart: arrow keys go from mark to mark, Enter chooses" });
  let at = -1;
  svg.addEventListener("pointermove", (event) => {
    if (marks.has(event.target)) point(event.target, event.clientX, event.clientY); else unpoint();
  });
  svg.addEventListener("pointerleave", unpoint);
  svg.addEventListener("blur", unpoint);
  svg.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === "Enter" && own[at]) choose(own[at].dataset.key);
    if (!by) return;
    event.preventDefault();
    at = (at + by + own.length) % own.length;
    const box = own[at].getBoundingClientRect();
    point(own[at], box.x + box.width / 2, box.y + box.height / 2);
  });
}

// Marks, rows and details of one key are of one thing: a click on one shows all.
const whenChosen = [];
function choose(key, quietly) {
  if (!key) return;
  for (const node of all(".chosen")) node.classList.remove("chosen");
  for (const node of all(`[data-key="${CSS.escape(key)}"]`)) {
    node.classList.add("chosen");
    if (node instanceof HTMLElement && !quietly) node.scrollIntoView({ block: "nearest" });
  }
  for (const action of whenChosen) action(key);
  showCommand(document.querySelector(`[data-key="${CSS.escape(key)}"][data-opens]`));
  remember("chosen", key);
}

// The command that writes the page of what is chosen.
function showCommand(node) {
  const old = document.getElementById("opens");
  if (old) old.remove();
  if (!node) return;
  const text = node.dataset.opens, box = make(document.querySelector("main"), "div", { id: "opens", class: "command" });
  make(box, "code", {}, text);
  addCopy(box);
}
document.addEventListener("click", (event) => {
  const node = event.target.closest("[data-key]");
  if (node && !event.target.closest("button, a, summary, code")) choose(node.dataset.key, node instanceof HTMLElement);
});

// -- files of a chart -----------------------------------------------------------------------------

const LOOK = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-opacity", "stroke-dasharray", "stroke-linejoin",
  "paint-order", "font-size", "font-weight", "font-family", "text-anchor", "shape-rendering"];

// An SVG with its colors in it, for light paper.
function standalone(svg) {
  const root = document.documentElement;
  root.style.colorScheme = "light";
  const copy = svg.cloneNode(true), box = svg.viewBox.baseVal;
  const copies = [copy, ...all("*", copy)];
  [svg, ...all("*", svg)].forEach((node, i) => {
    const look = getComputedStyle(node);
    for (const name of LOOK) copies[i].setAttribute(name, look.getPropertyValue(name));
    for (const name of ["class", "data-key", "data-tip", "tabindex", "style"]) copies[i].removeAttribute(name);
  });
  root.style.colorScheme = "";
  return fill(copy, { xmlns: svgSpace, width: box.width, height: box.height });
}

function save(content, name) {
  const link = fill(document.createElement("a"), { download: name, href: URL.createObjectURL(content) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

const svgFile = (svg) => new Blob([new XMLSerializer().serializeToString(svg)], { type: "image/svg+xml" });

function savePng(svg, name) {
  const image = new Image(), wide = Number(svg.getAttribute("width")), high = Number(svg.getAttribute("height"));
  image.onload = () => {
    const canvas = fill(document.createElement("canvas"), { width: 3 * wide, height: 3 * high });
    const pen = canvas.getContext("2d");
    pen.fillStyle = "#ffffff";
    pen.fillRect(0, 0, canvas.width, canvas.height);
    pen.drawImage(image, 0, 0, canvas.width, canvas.height);
    canvas.toBlob((content) => save(content, name));
    URL.revokeObjectURL(image.src);
  };
  image.src = URL.createObjectURL(svgFile(svg));
}

// The picture with lines of text below it: what it is of, and the command of its figures.
function signed(svg, lines) {
  const high = Number(svg.getAttribute("height")), wide = Number(svg.getAttribute("width")), more = 16 * lines.length;
  const look = { fill: "#565b61", "font-size": "12px", "font-family": "system-ui, sans-serif" };
  const most = Math.max(20, Math.floor(wide / 6.7));
  lines.forEach((text, i) => shape(svg, "text", { x: 4, y: high + 12 + 16 * i, ...look }, text.length > most ? `${text.slice(0, most - 1)}…` : text));
  return fill(svg, { height: high + more, viewBox: `0 0 ${wide} ${high + more}` });
}

// Buttons of a figure; `drawn` gives its SVG, without the lines `about` it.
function addExport(figure, drawn, about = []) {
  const caption = figure.querySelector("figcaption"), title = caption.textContent;
  const name = `${document.title}-${title}`.toLowerCase().replace(/[^a-z0-9.]+/g, "-");
  const tools = make(caption, "span", { class: "tools" });
  button(tools, "SVG", `${title}: save as SVG`, () => save(svgFile(signed(drawn(), about)), `${name}.svg`));
  button(tools, "PNG", `${title}: save as PNG`, () => savePng(signed(drawn(), about), `${name}.png`));
}
for (const figure of all("figure:has(> svg.wide)")) addExport(figure, () => standalone(shownSvg(figure)));

const shownSvg = (figure) => all(":scope > svg", figure).find((svg) => svg.getClientRects().length);

// -- commands -------------------------------------------------------------------------------------

// Of a page of one step: the state of another page of it which shows the same place.
let placeHere = null;
function addCopy(box) {
  const code = box.querySelector("code"), select = () => getSelection().selectAllChildren(code);
  const copy = button(box, "copy", "copy the command", () => {
    const told = () => { copy.textContent = "copied"; setTimeout(() => { copy.textContent = "copy"; }, 1500); };
    if (navigator.clipboard) navigator.clipboard.writeText(code.textContent).then(told, select); else select();
  });
  const file = code.textContent.split(" ").pop(), about = `${file}, once the command has written it beside this page`;
  const words = code.textContent.split(" ").map((word) => fill(document.createElement("span"), {}, word));
  code.replaceChildren(...words.flatMap((word, i) => (i ? [" ", word] : [word])));
  if (!file.endsWith(".html")) return;
  const link = make(box, "a", { href: file, title: about }, `open ${file}`);
  link.addEventListener("click", () => { if (placeHere !== null) link.hash = new URLSearchParams(placeHere()); });
}
all(".command").forEach(addCopy);

// -- tables ---------------------------------------------------------------------------------------

function keepSorting(table) {
  const name = table.dataset.name;
  addSorting(table, (i, down) => remember(`sort.${name}`, `${i}${down ? "d" : ""}`));
  const sorted = /^(\d+)(d?)$/.exec(state.get(`sort.${name}`) || "");
  if (sorted && Number(sorted[1]) < table.tHead.rows[0].cells.length) sortBy(table, Number(sorted[1]), sorted[2] === "d");
}

function addSearch(table) {
  const name = table.dataset.name;
  const input = fill(document.createElement("input"), { type: "search", placeholder: "search rows", "aria-label": "search rows" });
  const look = () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of table.tBodies[0].rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
    remember(`rows.${name}`, input.value);
  };
  table.parentNode.before(input);
  input.addEventListener("input", look);
  input.value = state.get(`rows.${name}`) || "";
  if (input.value) look();
}

for (const table of all("table.sorted")) {
  keepSorting(table);
  if (table.dataset.search !== undefined) addSearch(table);
}
// What scrolls is reached by keys.
for (const box of all(".rows")) if (box.scrollWidth > box.clientWidth) fill(box, { tabindex: 0, role: "group", "aria-label": "table" });
if (state.get("chosen")) choose(state.get("chosen"));
