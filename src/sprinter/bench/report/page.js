(() => {
  // tables: a press on a head sorts, a second one turns the order round; what has no number stays last
  const shown = (cell) => cell.textContent.trim().replaceAll(",", "").replace("−", "-");
  const order = (a, b, up) => {
    const [x, y] = [parseFloat(a), parseFloat(b)];
    if (Number.isNaN(x) || Number.isNaN(y)) {
      if (Number.isNaN(x) !== Number.isNaN(y)) return Number.isNaN(x) ? 1 : -1;
      return up * a.localeCompare(b);
    }
    return up * (x - y);
  };
  for (const table of document.querySelectorAll("table.sortable")) {
    table.querySelectorAll("thead th").forEach((head, column) => {
      if (!head.textContent) return;
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const first = column === 0 ? 1 : -1;
        const up = head.ariaSort ? (head.ariaSort === "ascending" ? -1 : 1) : first;
        for (const other of table.querySelectorAll("thead th")) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", up > 0 ? "ascending" : "descending");
        const rows = [...table.tBodies[0].rows];
        const key = (row) => (column === 0 ? `n ${row.cells[0].textContent.trim()}` : shown(row.cells[column]));
        rows.sort((a, b) => order(key(a), key(b), up));
        table.tBodies[0].append(...rows);
      });
    });
  }
  // tooltips, at once and by touch; the browser's own are for pages without scripts
  const tip = document.getElementById("tip");
  const tips = new WeakMap();
  for (const title of document.querySelectorAll(".tip > title")) {
    tips.set(title.parentNode, title.textContent);
    title.remove();
  }
  const light = document.createElement("style");
  document.head.append(light);
  const leave = () => { tip.hidden = true; light.textContent = ""; };
  const enter = (event) => {
    const mark = event.target.closest(".tip, [data-arm]");
    if (!mark) return leave();
    const arm = mark.dataset.arm;
    const drawn = mark.closest("svg.area, .kinds");
    light.textContent = drawn && arm ? `svg.area [data-arm]:not([data-arm="${arm}"]){opacity:.18}` : "";
    const text = tips.get(mark);
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    const box = tip.getBoundingClientRect();
    const x = Math.min(event.clientX + 14, innerWidth - box.width - 8);
    const below = event.clientY + 18 + box.height < innerHeight;
    tip.style.left = `${Math.max(8, x)}px`;
    tip.style.top = `${below ? event.clientY + 18 : Math.max(8, event.clientY - box.height - 12)}px`;
  };
  document.addEventListener("pointerover", enter);
  document.addEventListener("pointerdown", enter);
  document.addEventListener("scroll", leave, { passive: true });
})();
