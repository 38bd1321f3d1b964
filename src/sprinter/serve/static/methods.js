// Methods and their dials: a method is written as name(parameter=value, ...).

const RANGES = {
  tau: [0, 1, 0.01], rate: [0, 1, 0.01], share: [0, 1, 0.01], w: [0, 1, 0.01], c: [0, 1, 0.01], fallback: [0, 1, 0.01],
  epsilon: [0, 1, 0.01], delta: [0, 1, 0.01], threshold: [0, 4, 0.05], kl: [0, 2, 0.01], h: [0, 2, 0.05], gamma: [1, 16, 1],
  start: [1, 16, 1], drafts: [1, 8, 1], n: [1, 8, 1],
};

export function parse(spec) {
  const [, name, inside] = /^([^(]+)(?:\((.*)\))?$/s.exec(spec) ?? [null, spec, ""];
  const values = new Map();
  for (const part of (inside ?? "").split(",")) {
    const [key, value] = part.split("=").map((one) => one.trim());
    if (value !== undefined) values.set(key, value);
  }
  return { name: name.trim(), values };
}

export function spell({ name, values }) {
  const inside = [...values].map(([key, value]) => `${key}=${value}`).join(", ");
  return inside ? `${name}(${inside})` : name;
}

/** The parameters of a method that are dials: [name, number, [min, max, step]]. */
export function dials(method) {
  return [...method.values]
    .filter(([key, value]) => key in RANGES && Number.isFinite(Number(value)))
    .map(([key, value]) => {
      const [min, max, step] = RANGES[key];
      return [key, Number(value), [Math.min(min, value), Math.max(max, value), step]];
    });
}

/** Fill a fieldset with a choice of method and its dials; `changed` is called with the spec. */
export function chooser(field, methods, spec, changed) {
  const select = document.createElement("select");
  const place = document.createElement("div");
  const note = document.createElement("p");
  const number = field.dataset.side;
  note.className = "quiet";
  select.setAttribute("aria-label", field.querySelector("legend").textContent);
  for (const one of methods) {
    select.add(new Option(one.lossless ? `${one.name} (lossless)` : one.name, one.spec));
  }
  let current = parse(spec);

  function show() {
    place.replaceChildren();
    for (const [key, value, [min, max, step]] of dials(current)) {
      const label = document.createElement("label");
      const shown = document.createElement("output");
      const input = document.createElement("input");
      Object.assign(input, { type: "range", min, max, step, value, id: `dial-${number}-${key}` });
      shown.textContent = value;
      input.addEventListener("input", () => {
        current.values.set(key, input.value);
        shown.textContent = input.value;
        changed(spell(current));
      });
      label.append(`${key} `, shown, input);
      place.append(label);
    }
    const found = methods.find((one) => parse(one.spec).name === current.name);
    note.textContent = found ? found.paper : "";
  }

  select.addEventListener("change", () => {
    current = parse(select.value);
    show();
    changed(spell(current));
  });
  const first = methods.find((one) => parse(one.spec).name === current.name);
  if (first) select.value = first.spec;
  if (first && !current.values.size) current = parse(first.spec);
  field.replaceChildren(field.querySelector("legend"), select, place, note);
  show();
  return () => spell(current);
}
