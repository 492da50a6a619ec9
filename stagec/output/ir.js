// The page of a module: searches its lines, folds its regions.
const lines = all("#ir summary, #ir div").filter((node) => !node.querySelector("div, details"));
const regions = all("#ir details");
const find = byId("find");
let hits = [], here = -1;

function unfold(line) {
  for (let region = line.parentNode.closest("details"); region; region = region.parentNode.closest("details")) region.open = true;
}

function goTo(by) {
  if (!hits.length) return;
  if (hits[here]) hits[here].classList.remove("here");
  here = (here + by + hits.length) % hits.length;
  hits[here].classList.add("here");
  unfold(hits[here]);
  hits[here].scrollIntoView({ block: "center", inline: "nearest" });
  byId("count").textContent = `${exact(here + 1)} of ${exact(hits.length)}`;
}

function search() {
  const words = find.value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const line of hits) line.classList.remove("hit", "here");
  hits = words.length ? lines.filter((line) => words.every((word) => line.textContent.toLowerCase().includes(word))) : [];
  for (const line of hits) line.classList.add("hit");
  here = -1;
  byId("count").textContent = words.length ? `${exact(hits.length)} line${hits.length === 1 ? "" : "s"}` : "";
  remember("find", find.value);
}

function fold(open) { for (const region of regions.slice(open ? 0 : 1)) region.open = open; }

byId("fold").addEventListener("click", () => fold(false));
byId("unfold").addEventListener("click", () => fold(true));
byId("next").addEventListener("click", () => goTo(1));
byId("previous").addEventListener("click", () => goTo(-1));
find.addEventListener("input", search);
find.addEventListener("keydown", (event) => { if (event.key === "Enter") goTo(event.shiftKey ? -1 : 1); });
addEventListener("keydown", (event) => {
  if (event.target.closest("input") || event.ctrlKey || event.metaKey || event.altKey) return;
  const keys = { "/": () => find.focus(), n: () => goTo(1), p: () => goTo(-1), f: () => fold(false), u: () => fold(true) };
  if (!keys[event.key]) return;
  event.preventDefault();
  keys[event.key]();
});
find.value = state.get("find") || "";
if (find.value) { search(); goTo(1); }
