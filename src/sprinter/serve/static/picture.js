// Tokens per second against mean drift: a point for each answer, a shape and a colour for each method.

const NS = "http://www.w3.org/2000/svg";
const LEFT = 40, RIGHT = 308, TOP = 12, BOTTOM = 180;
const SHAPES = [
  (x, y) => `M${x - 5} ${y}a5 5 0 1 0 10 0a5 5 0 1 0 -10 0`,
  (x, y) => `M${x - 5} ${y - 5}h10v10h-10z`,
  (x, y) => `M${x} ${y - 6}l6 11h-12z`,
  (x, y) => `M${x} ${y - 7}l7 7l-7 7l-7 -7z`,
  (x, y) => `M${x} ${y + 6}l6 -11h-12z`,
];

function make(name, attributes, text) {
  const element = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 5, 10].find((step) => value <= step * power * 1.0001);
}

export function draw(svg, runs) {
  svg.replaceChildren();
  const drift = nice(Math.max(0.05, ...runs.map((run) => run.drift ?? 0)));
  const speed = nice(Math.max(1, ...runs.map((run) => run.speed ?? 0)));
  const x = (value) => LEFT + ((RIGHT - LEFT) * value) / drift;
  const y = (value) => BOTTOM - ((BOTTOM - TOP) * value) / speed;
  for (const part of [0, 0.5, 1]) {
    svg.append(make("line", { class: "axis", x1: LEFT, x2: RIGHT, y1: y(part * speed), y2: y(part * speed) }));
    svg.append(make("text", { x: LEFT - 6, y: y(part * speed) + 3, "text-anchor": "end" }, +(part * speed).toPrecision(3)));
    svg.append(make("text", { x: x(part * drift), y: BOTTOM + 14, "text-anchor": "middle" }, +(part * drift).toPrecision(3)));
  }
  svg.append(make("text", { x: RIGHT, y: BOTTOM + 28, "text-anchor": "end" }, "mean drift"));
  svg.append(make("text", { x: LEFT, y: BOTTOM + 28 }, "tokens/s, upwards"));
  const names = [...new Set(runs.map((run) => run.method.split("(")[0]))];
  for (const run of runs) {
    const kind = names.indexOf(run.method.split("(")[0]) % SHAPES.length;
    const point = make("path", { class: `point s${kind}`, d: SHAPES[kind](x(run.drift ?? 0), y(run.speed ?? 0)) });
    point.append(make("title", {}, `${run.method}: ${run.speed?.toFixed(1)} tokens/s, drift ${run.drift?.toFixed(3) ?? "unknown"}`));
    svg.append(point);
  }
  names.forEach((name, i) => {
    const at = LEFT + 90 * (i % 3);
    svg.append(make("path", { class: `point s${i % SHAPES.length}`, d: SHAPES[i % SHAPES.length](at, BOTTOM + 46 + 12 * Math.floor(i / 3) - 4) }));
    svg.append(make("text", { x: at + 9, y: BOTTOM + 46 + 12 * Math.floor(i / 3) }, name));
  });
  svg.setAttribute("viewBox", `0 0 320 ${BOTTOM + 54 + 12 * Math.floor(Math.max(0, names.length - 1) / 3)}`);
}

export function list(table, runs) {
  const rows = runs.map((run) => {
    const row = document.createElement("tr");
    for (const value of [run.method, run.speed?.toFixed(1), run.calls?.toFixed(2), run.drift?.toFixed(3)]) {
      row.append(Object.assign(document.createElement("td"), { textContent: value ?? "–" }));
    }
    return row;
  });
  table.querySelector("tbody").replaceChildren(...rows);
}
