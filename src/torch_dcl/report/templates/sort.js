(() => {
  const order = new Intl.Collator("en", {numeric: true});
  const words = cell => cell ? cell.textContent.trim() : "";
  const number = text => {
    const found = text.replace(/\u2212/g, "-").replace(/(\d),(?=\d{3})/g, "$1").match(/[-+]?\d+(\.\d+)?/);
    return found ? parseFloat(found[0]) : NaN;
  };
  for (const table of document.querySelectorAll("table.sort")) {
    const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0], before = [...body.rows];
    heads.forEach((head, i) => {
      const button = document.createElement("button");
      button.type = "button";
      button.title = "Sort";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const next = {ascending: "descending", descending: null}[head.getAttribute("aria-sort")];
        const way = next === undefined ? "ascending" : next;
        heads.forEach(other => other.removeAttribute("aria-sort"));
        table.classList.toggle("sorted", way !== null);
        if (way === null) { body.append(...before); return; }
        head.setAttribute("aria-sort", way);
        const down = way === "descending" ? -1 : 1;
        const rows = before.map(row => ({row, text: words(row.cells[i]), number: number(words(row.cells[i]))}));
        const empty = entry => i > 0 && Number.isNaN(entry.number);
        rows.sort((a, b) => empty(a) - empty(b) || (empty(a) ? 0 :
          down * (i > 0 ? a.number - b.number : order.compare(a.text, b.text))));
        body.append(...rows.map(entry => entry.row));
      });
    });
  }
})();
