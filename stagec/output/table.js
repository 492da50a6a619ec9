// Tables that are sorted by their heads, in pages and in notebooks.
const cellValue = (row, i) => {
  const cell = row.cells[i];
  if (!cell) return "";
  return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value);
};

function sortBy(table, i, down) {
  const body = table.tBodies[0], rows = [...body.rows];
  const compare = (a, b) => (typeof a === typeof b ? (a < b ? -1 : a > b ? 1 : 0) : typeof a === "number" ? -1 : 1);
  rows.sort((a, b) => (down ? -1 : 1) * compare(cellValue(a, i), cellValue(b, i)));
  body.append(...rows);
  [...table.tHead.rows[0].cells].forEach((head, k) => {
    if (k === i) head.setAttribute("aria-sort", down ? "descending" : "ascending"); else head.removeAttribute("aria-sort");
  });
}

// Makes a button of each head; `done` gets the column and the direction of a sort.
function addSorting(table, done) {
  [...table.tHead.rows[0].cells].forEach((head, i) => {
    if (!head.textContent) return;
    const on = document.createElement("button");
    on.type = "button";
    on.append(...head.childNodes);
    head.append(on);
    on.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      sortBy(table, i, down);
      done(i, down);
    });
  });
}
