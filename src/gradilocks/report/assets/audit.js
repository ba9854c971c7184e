// The panel of an audit: switches between formats and kinds of gradients, and sorts its modules.
"use strict";
for (const data of document.querySelectorAll(".told")) {
  const told = JSON.parse(data.textContent);
  const panel = data.closest(".audit");
  const table = panel.querySelector(".modules");
  const body = table && table.tBodies[0];
  const rows = table ? [...body.rows] : [];
  const kept = '<span class="kept">keep in higher precision</span>';
  const switches = [...panel.querySelectorAll(".switch")];
  const chosen = () => switches.map((each) => each.querySelector("input:checked").value);
  let format = chosen()[0];
  let order = { column: null, falls: true };

  function tell() {
    const { words, scale, keep, cells: written } = told[format];
    panel.querySelector(".format-words").innerHTML = words;
    if (!table) return;
    panel.querySelector(".shown-format").textContent = format;
    panel.querySelector(".shown-scale").innerHTML = scale;
    const keeping = new Set(keep);
    rows.forEach((row, at) => {
      row.classList.toggle("keep", keeping.has(at));
      const [name, ...cells] = row.cells;
      name.querySelector(".kept")?.remove();
      if (keeping.has(at)) name.insertAdjacentHTML("beforeend", kept);
      cells.forEach((cell, i) => { cell.textContent = written[at][i]; });
    });
    sort();
  }

  function sort() {
    const { column, falls } = order;
    const places = rows.map((_, at) => at);
    if (column === -1) {
      places.sort((a, b) => rows[a].cells[0].textContent.localeCompare(rows[b].cells[0].textContent, "en", { numeric: true }));
      if (falls) places.reverse();
    } else if (column !== null) {
      const value = (at) => told[format].rows[at][column];
      // What has no number comes last, whichever way the others go.
      places.sort((a, b) => (value(a) === null) - (value(b) === null) || (falls ? -1 : 1) * (value(a) - value(b)));
    }
    body.append(...places.map((at) => rows[at]));
  }

  function sortable(head, column) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "sort";
    button.append(...head.childNodes);
    head.append(button);
    const first = column % 4 !== 3 && column !== -1;
    button.addEventListener("click", () => {
      if (order.column !== column) order = { column, falls: first };
      else if (order.falls === first) order = { column, falls: !first };
      else order = { column: null, falls: true };
      for (const other of table.querySelectorAll("[aria-sort]")) other.removeAttribute("aria-sort");
      if (order.column !== null) head.setAttribute("aria-sort", order.falls ? "descending" : "ascending");
      sort();
    });
  }

  if (table) {
    sortable(table.tHead.rows[0].cells[0], -1);
    [...table.tHead.rows[1].cells].forEach(sortable);
  }
  for (const each of switches) {
    each.hidden = false;
    each.addEventListener("change", () => {
      for (const canvas of panel.querySelectorAll(".canvas")) {
        canvas.dispatchEvent(new CustomEvent("view", { detail: chosen() }));
      }
      if (format !== chosen()[0]) { [format] = chosen(); tell(); }
    });
  }
}
