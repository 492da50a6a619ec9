// What the pages have in common. All text from the data becomes text nodes, never markup.
const data = JSON.parse(document.getElementById("data").textContent);
const tip = document.getElementById("tip");
const svgSpace = document.getElementById("shape").namespaceURI;

// -- small helpers --------------------------------------------------------------------------------

function make(parent, tag, attributes, text) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}

function shape(parent, tag, attributes, text) {
  const node = document.createElementNS(svgSpace, tag);
  for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}

function scaled(value, base, units) {
  let unit = 0;
  while (Math.abs(value) >= base && unit < units.length - 1) { value /= base; unit += 1; }
  return unit ? `${value.toFixed(2)} ${units[unit]}` : `${value} ${units[0]}`;
}

const bytesText = (value) => scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]);
const exact = (value) => value.toLocaleString("en-US");
const timeText = (value) => scaled(value, 1000, ["ps", "ns", "µs", "ms", "s"]);

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

// Shows the tip beside the pointer, inside the window.
function placeTip(x, y) {
  tip.hidden = false;
  const wide = tip.offsetWidth, high = tip.offsetHeight;
  tip.style.left = `${Math.max(8, x + 16 + wide > innerWidth ? x - wide - 16 : x + 16)}px`;
  tip.style.top = `${Math.max(8, Math.min(y + 14, innerHeight - high - 8))}px`;
}
