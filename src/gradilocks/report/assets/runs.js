// The table of all runs: sorted by a click on a head, searched by what is typed.
"use strict";
(() => {
  const table = document.querySelector(".runs table");
  const body = table.tBodies[0];
  const rows = [...body.rows];  // Newest first, as the page has them.
  const numeric = (text) => text !== "" && !Number.isNaN(Number(text));

  function sort(column, falls) {
    const value = (row) => row.cells[column].dataset.value;
    const ordered = rows.slice().sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      // What has no value comes last, whichever way the others go.
      if ((x === "") !== (y === "")) return x === "" ? 1 : -1;
      const order = numeric(x) && numeric(y) ? x - y : x.localeCompare(y, "en", { numeric: true });
      return falls ? -order : order;
    });
    body.append(...ordered);
  }

  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "sort";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const falls = head.getAttribute("aria-sort") === "ascending";
      for (const other of table.querySelectorAll("[aria-sort]")) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", falls ? "descending" : "ascending");
      sort(column, falls);
    });
  });

  const find = document.getElementById("find");
  find.closest("p").hidden = false;
  find.addEventListener("input", () => {
    const words = find.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      shown += !row.hidden;
    }
    document.getElementById("found").textContent = words.length ? `${shown} of ${rows.length}` : "";
  });
})();
