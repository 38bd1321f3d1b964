// The page: a conversation or a completion, one method or two side by side, dials that may be turned while it writes.

import { getModels, getPair, stream, withKey } from "./api.js";
import { Answer, ORIGINS } from "./answer.js";
import { chooser } from "./methods.js";
import { draw, list } from "./picture.js";
import { BoxError, results, shape } from "./shape.js";

const $ = (id) => document.getElementById(id);
const talk = []; // messages of the chat so far
const runs = []; // finished answers
const open = new Map(); // side -> the answer that is being written
const REST_MS = 250; // a dial that rests this long is used
let model = null; // that is chosen, where there are several
let spec = [() => "", () => ""];
let timers = [null, null];

function told(text) {
  $("status").textContent = text;
}

function failed(error) {
  const box = $("error");
  box.textContent = error?.message ?? String(error);
  box.hidden = false;
}

const mode = () => document.querySelector('input[name="mode"]:checked').value;
const number = (id, fallback) => (Number.isFinite($(id).valueAsNumber) ? $(id).valueAsNumber : fallback);

const asked = shape($("shape"), () => mode() === "chat");

function askKey() {
  const dialog = $("key-dialog");
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve($("key").value.trim()), { once: true });
    dialog.showModal();
  });
}

/** `fields`: what the answer must be, and tools. */
function request(side, messages, prompt, fields, answer) {
  const body = {
    stream: true, stream_options: { include_usage: true },
    temperature: number("temperature", 1), seed: number("seed", 0),
    max_tokens: Math.max(1, number("tokens", 128) - answer.tokens.length),
    sprinter: { method: spec[side](), tokens: true },
    ...fields, ...(model ? { model } : {}),
  };
  if (mode() === "chat") {
    const begun = answer.text ? [{ role: "assistant", content: answer.text }] : [];
    const raw = fields.tools ? {} : { skip_special_tokens: false }; // a raw text is not read for calls
    return ["v1/chat/completions", { ...body, ...raw, logprobs: true, messages: [...messages, ...begun] }];
  }
  return ["v1/completions", { ...body, logprobs: 0, prompt: prompt + answer.text }];
}

/** Write one answer; a dial that is turned meanwhile aborts the request, and the text goes on with the new method. */
async function write(side, messages, prompt, fields, answer) {
  const run = { answer, abort: new AbortController(), stopped: false, whole: Object.keys(fields).length > 0 };
  open.set(side, run);
  let reason = "stop";
  try {
    for (;;) {
      try {
        const [path, body] = request(side, messages, prompt, fields, answer);
        for await (const event of stream(path, body, run.abort.signal)) answer.add(event);
        break;
      } catch (error) {
        if (error.name !== "AbortError") throw error;
        reason = "stopped";
        if (run.stopped || answer.tokens.length >= number("tokens", 128)) break;
        run.abort = new AbortController();
        answer.resumed(spec[side]());
        reason = "stop";
      }
    }
  } catch (error) {
    reason = "error";
    if (error.status === 401) throw error;
    failed(error);
  } finally {
    open.delete(side);
    answer.ended(reason);
  }
  const found = answer.facts_now;
  if (found.tokens) {
    runs.push(found);
    draw($("picture"), runs);
    list($("runs"), runs);
    $("picture-note").textContent = `${runs.length} so far; a text that is short or mixed says little.`;
  }
}

function turned(side) {
  clearTimeout(timers[side]);
  timers[side] = setTimeout(() => {
    const run = open.get(side);
    if (!run || run.answer.method === spec[side]()) return;
    if (run.whole) told("JSON and calls are written in one go: the setting counts from the next answer on");
    else run.abort.abort();
  }, REST_MS);
}

function stop() {
  for (const run of open.values()) {
    run.stopped = true;
    run.abort.abort();
  }
}

function busy(yes) {
  $("send").disabled = yes;
  $("stop").disabled = !yes;
  $("clear").disabled = yes;
}

/** Ask for the next answer, to what is in the box or, in a chat, to the results of calls. */
async function send(given = null) {
  const said = given ? given.map((one) => `Result: ${one.content}`).join("\n") : $("prompt").value;
  if (!said.trim() || open.size) return;
  $("error").hidden = true;
  let fields;
  try {
    fields = asked.read();
  } catch (error) {
    failed(error);
    if (error instanceof BoxError) error.box.focus();
    return;
  }
  const sides = $("compare").checked ? [0, 1] : [0];
  const turn = document.createElement("li");
  const question = Object.assign(document.createElement("p"), { className: "said", textContent: said });
  const place = Object.assign(document.createElement("div"), { className: sides.length > 1 ? "answers two" : "answers" });
  const answers = sides.map((side) => new Answer(spec[side](), "response_format" in fields));
  place.append(...answers.map((answer) => answer.element));
  turn.append(question, place);
  $("turns").append(turn);
  const system = $("system").value.trim();
  const added = given ?? [{ role: "user", content: said }];
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...talk, ...added];
  for (const old of document.querySelectorAll(".results")) old.remove();
  busy(true);
  told("writing");
  turn.scrollIntoView({ block: "end" });
  try {
    await withKey(() => Promise.all(sides.map((side, i) => write(side, messages, said, fields, answers[i]))), askKey);
    const { text, calls, element } = answers[0];
    if (mode() === "chat" && (text || calls.length)) {
      talk.push(...added, { role: "assistant", content: text, ...(calls.length ? { tool_calls: calls } : {}) });
      if (!given) $("prompt").value = "";
      if (calls.length) element.append(results(calls, send));
    }
    told(sides.length > 1 && mode() === "chat" ? "done; the chat goes on with the first answer" : "done");
  } catch (error) {
    failed(error);
    told("");
  } finally {
    busy(false);
    (document.querySelector(".results textarea") ?? $("prompt")).focus();
  }
}

function formed() {
  const chat = mode() === "chat";
  $("prompt-label").textContent = chat ? "Message" : "Text to be continued";
  $("system-field").hidden = !chat;
  asked.show();
}

function legend() {
  for (const [origin, about] of Object.entries(ORIGINS)) {
    const name = document.createElement("dt");
    name.append(Object.assign(document.createElement("span"), { className: origin, textContent: origin }));
    $("legend").append(name, Object.assign(document.createElement("dd"), { textContent: about }));
  }
}

/** What the server says of its pair, as soon as the models are loaded. */
async function loadedPair() {
  for (;;) {
    try {
      return await getPair(model);
    } catch (error) {
      if (error.status !== 503) throw error;
      told("the models are loading");
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
  }
}

/** Show a pair and what it offers. */
async function loaded() {
  const pair = await withKey(loadedPair, askKey);
  $("model").textContent = pair.draft ? `${pair.model}, drafted by ${pair.draft}` : pair.model;
  const [first, second] = document.querySelectorAll(".side");
  spec = [
    chooser(first, pair.methods, pair.default_method, () => turned(0)),
    chooser(second, pair.methods, "autoregressive", () => turned(1)),
  ];
  document.querySelector('input[value="chat"]').disabled = !pair.chat;
  if (!pair.chat) document.querySelector('input[value="text"]').checked = true;
  $("chat-note").textContent = pair.chat ? "" : "This pair has no chat template: completions only, without tools.";
  asked.offered(pair.no_json, pair.no_tools);
  formed();
  told("ready");
}

async function begin() {
  legend();
  draw($("picture"), runs);
  await loaded();
  const names = await getModels();
  $("models").replaceChildren(...names.map((name) => new Option(name)));
  $("models-field").hidden = names.length < 2;
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && open.size) stop();
});
$("stop").addEventListener("click", stop);
$("clear").addEventListener("click", () => {
  talk.length = 0;
  $("turns").replaceChildren();
  $("error").hidden = true;
  told("ready");
});
$("compare").addEventListener("change", () => {
  document.querySelector('.side[data-side="1"]').hidden = !$("compare").checked;
});
$("models").addEventListener("change", () => {
  model = $("models").value;
  loaded().catch(failed);
});
for (const one of document.querySelectorAll('input[name="mode"]')) one.addEventListener("change", formed);
$("theme").addEventListener("click", () => {
  const dark = document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "light" : "dark";
});
begin().catch(failed);
