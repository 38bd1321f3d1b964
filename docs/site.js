"use strict";
// Tables of results: a click on a column's head sorts by it. Speed against drift is a chart too; a point says which row
// it is, by pointer, touch or keyboard. Without scripts the tables stay as they are.
(() => {
  const text = (row, column) => row.cells[column].textContent.trim();
  const number = (words) => parseFloat(words.replace(/,(?=\d{3})/g, ""));
  const make = (name, given, parent, words) => {
    const one = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(given)) one.setAttribute(key, value);
    if (words !== undefined) one.textContent = words;
    return parent.appendChild(one);
  };

  const sortable = (table, heads, rows) =>
    heads.forEach((head, column) => {
      const sort = () => {
        const down = head.getAttribute("aria-sort") !== "descending";
        for (const other of heads) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const order = (a, b) => {
          const [x, y] = [text(a, column), text(b, column)], [m, n] = [number(x), number(y)];
          if (isNaN(m) || isNaN(n)) return isNaN(m) - isNaN(n) || x.localeCompare(y) * (down ? 1 : -1);
          return (m - n) * (down ? -1 : 1);
        };
        table.tBodies[0].append(...[...rows].sort(order));
      };
      head.tabIndex = 0;
      head.title = "Sort";
      head.addEventListener("click", sort);
      head.addEventListener("keydown", (event) => event.key === "Enter" && sort());
    });

  const chart = (table, rows, x, y) => {
    const points = rows.map((row) => {
      const range = /\[([-+\d.]+),\s*([-+\d.]+)\]/.exec(text(row, y));
      return { row, drift: number(text(row, x)), speed: number(text(row, y)), range: range && [+range[1], +range[2]] };
    }).filter((one) => !isNaN(one.drift) && !isNaN(one.speed));
    const most = Math.max(...points.map((one) => one.drift));
    if (points.length < 3 || !(most > 0)) return;
    const ends = points.flatMap((one) => [1, one.speed, ...(one.range || [])]);
    const low = Math.floor(Math.min(...ends) * 10) / 10;
    const high = Math.max(low + 0.1, Math.ceil(Math.max(...ends) * 10) / 10);
    const across = (drift) => 50 + (560 * drift) / most, up = (speed) => 220 - (200 * (speed - low)) / (high - low);
    const figure = document.createElement("figure"), said = document.createElement("figcaption");
    figure.className = "chart";
    said.textContent = "Speed over plain decoding against drift. Arms at one place stand side by side. Point at one.";
    const svg = make("svg", { viewBox: "0 0 640 262", role: "group", "aria-label": "Speed against drift" }, figure);
    for (let i = 0; i <= 4; i++) {
      const speed = low + ((high - low) * i) / 4, drift = (most * i) / 4;
      make("path", { d: `M50 ${up(speed)}H610`, class: "grid" }, svg);
      make("text", { x: 42, y: up(speed) + 4, "text-anchor": "end" }, svg, speed.toFixed(2));
      make("text", { x: across(drift), y: 242, "text-anchor": "middle" }, svg, drift.toFixed(3));
    }
    make("text", { x: 330, y: 259, "text-anchor": "middle" }, svg, "mean drift");
    const taken = [];
    for (const { row, drift, speed, range } of points) {
      let at = across(drift);  // beside points that would be covered, such as other exact methods
      while (taken.some(([x, y]) => Math.hypot(x - at, y - up(speed)) < 11)) at += 11;
      taken.push([at, up(speed)]);
      const point = make("g", { tabindex: 0, role: "img" }, svg);
      if (range) make("path", { d: `M${at} ${up(range[0])}V${up(range[1])}` }, point);
      make("circle", { cx: at, cy: up(speed), r: 6 }, point);
      const words = `${text(row, 0)}: ${text(row, y)} times plain, drift ${text(row, x)}`;
      point.setAttribute("aria-label", words);
      const pick = () => {
        for (const one of table.querySelectorAll(".picked")) one.classList.remove("picked");
        for (const one of svg.querySelectorAll(".picked")) one.classList.remove("picked");
        row.classList.add("picked");
        point.classList.add("picked");
        said.textContent = words;
      };
      for (const event of ["pointerenter", "focus", "click"]) point.addEventListener(event, pick);
    }
    figure.append(said);
    (table.closest(".md-typeset__scrollwrap") || table).before(figure);
  };

  for (const table of document.querySelectorAll(".md-content table")) {
    const heads = [...table.tHead?.rows[0]?.cells || []], rows = [...table.tBodies[0]?.rows || []];
    const names = heads.map((head) => head.textContent.trim());
    const [x, y] = [names.indexOf("mean drift"), names.findIndex((name) => name === "÷ plain")];
    if (y < 0) continue;
    sortable(table, heads, rows);
    if (x > 0) chart(table, rows, x, y);
  }
})();
