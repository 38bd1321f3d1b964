// One answer: its tokens by origin, what is known of each, and gauges that move while it is written.

import { card } from "./shape.js";

export const ORIGINS = {
  trusted: "kept from the draft without asking the target",
  accepted: "drafted, checked by the target and kept",
  replacement: "the target's, instead of a draft token that it refused",
  bonus: "the target's, after a draft of which it kept all",
  target: "written by the target",
};

const shown = (value, digits) => (value === null || value === undefined || !Number.isFinite(value) ? "–" : value.toFixed(digits));

function isJson(text) {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

export class Answer {
  /** `json`: the text must be JSON. */
  constructor(method, json = false) {
    this.json = json;
    this.calls = []; // of tools
    this.tokens = [];
    this.spans = [];
    this.text = "";
    this.report = null;
    this.rounds = new Set(); // rounds that called the target
    this.began = performance.now();
    this.last = null;
    this.at = -1;
    this.element = document.createElement("article");
    this.element.className = "answer busy";
    this.element.innerHTML =
      '<h3></h3><p class="text" tabindex="0" role="group"></p><p class="facts" aria-live="polite"></p><dl class="gauges"></dl>';
    this.title = this.element.querySelector("h3");
    this.body = this.element.querySelector(".text");
    this.facts = this.element.querySelector(".facts");
    this.gauges = {};
    for (const [name, label] of [["speed", "tokens/s"], ["calls", "tokens/target call"], ["drift", "mean drift"], ["coverage", "drift known"]]) {
      const box = document.createElement("div");
      const value = document.createElement("dd");
      box.append(Object.assign(document.createElement("dt"), { textContent: label }), value);
      value.dataset.gauge = name;
      value.textContent = "–";
      this.gauges[name] = value;
      this.element.querySelector(".gauges").append(box);
    }
    this.named(method);
    this.body.setAttribute("aria-label", "Answer; the arrow keys show what is known of each token");
    this.body.addEventListener("keydown", (event) => this.moved(event));
    this.body.addEventListener("pointerover", (event) => this.pointed(event));
    this.body.addEventListener("click", (event) => this.pointed(event));
    this.offset = 0; // tokens before those of the running request
  }

  named(method) {
    this.method = method;
    this.title.textContent = method;
  }

  /** The text goes on with other settings: indices of tokens begin anew. */
  resumed(method) {
    this.offset = this.tokens.length;
    this.report = null;
    const mark = document.createElement("span");
    mark.className = "mark";
    mark.textContent = method;
    this.body.append(mark);
    this.named(method);
  }

  add(event) {
    for (const token of event.sprinter?.tokens ?? []) this.token(token);
    for (const token of event.sprinter?.scored ?? []) this.scored(token);
    const choice = event.choices?.[0];
    this.text += choice?.delta?.content ?? choice?.text ?? "";
    for (const { index, ...call } of choice?.delta?.tool_calls ?? []) {
      this.calls.push(call);
      this.facts.before(card(call));
    }
    if (event.sprinter && "lossless" in event.sprinter) this.report = event.sprinter;
    this.gauge();
  }

  token(token) {
    const span = document.createElement("span");
    span.className = token.origin;
    span.textContent = token.text;
    span.dataset.index = this.tokens.length;
    this.tokens.push(token);
    this.spans.push(span);
    this.body.append(span);
    this.last = performance.now();
    if (token.origin !== "trusted") this.rounds.add(`${this.offset}:${token.round}`);
  }

  scored(token) {
    const index = this.offset + token.index;
    if (index < this.tokens.length) {
      this.tokens[index] = token;
      if (this.at === index) this.look(index);
    }
  }

  get known() {
    return this.tokens.filter((token) => token.drift !== null && token.drift !== undefined);
  }

  get facts_now() {
    const count = this.tokens.length;
    const known = this.known;
    const seconds = (this.last - this.began) / 1000;
    const calls = this.rounds.size;
    return {
      method: this.method,
      speed: seconds > 0 ? count / seconds : null,
      calls: calls ? count / calls : null,
      drift: known.length ? known.reduce((sum, token) => sum + token.drift, 0) / known.length : null,
      coverage: count ? known.length / count : null,
      tokens: count,
    };
  }

  gauge() {
    const found = this.facts_now;
    this.gauges.speed.textContent = shown(found.speed, 1);
    this.gauges.calls.textContent = shown(found.calls, 2);
    this.gauges.drift.textContent = shown(found.drift, 3);
    this.gauges.coverage.textContent = found.coverage === null ? "–" : `${Math.round(100 * found.coverage)} %`;
  }

  ended(reason) {
    this.element.classList.remove("busy");
    this.element.dataset.ended = reason;
    if (this.report) this.badge(this.report.lossless ? "lossless" : "lossy");
    if (this.json && reason !== "error") this.badge(isJson(this.text) ? "JSON" : "JSON that is not whole");
    if (!this.tokens.length && reason !== "error") this.facts.textContent = "No tokens.";
    this.gauge();
  }

  badge(text) {
    this.title.append(Object.assign(document.createElement("span"), { className: "badge", textContent: text }));
  }

  pointed(event) {
    const index = event.target.dataset?.index;
    if (index !== undefined) this.look(Number(index));
  }

  moved(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
    if (step === undefined || !this.tokens.length) return;
    event.preventDefault();
    this.look(Math.max(0, Math.min(this.tokens.length - 1, this.at + step)));
  }

  look(index) {
    this.spans[this.at]?.classList.remove("at");
    this.at = index;
    this.spans[index].classList.add("at");
    const token = this.tokens[index];
    const p = token.logprob ?? null;
    const q = token.draft_logprob ?? null;
    const parts = [
      JSON.stringify(token.text),
      `${token.origin}, round ${token.round}`,
      `p ${p === null ? "–" : shown(Math.exp(p), 3)}`,
      `q ${q === null ? "–" : shown(Math.exp(q), 3)}`,
      `drift ${shown(token.drift, 3)}`,
    ];
    if (token.gate_score !== null && token.gate_score !== undefined) parts.push(`gate ${shown(token.gate_score, 3)}`);
    this.facts.textContent = parts.join(" · ");
  }
}
