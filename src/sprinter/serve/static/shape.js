// What an answer must be, and the tools that it may call: both are pasted as JSON.

/** A box that cannot be read. */
export class BoxError extends Error {
  constructor(box, message) {
    super(message);
    this.box = box;
  }
}

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

function parsed(box, what) {
  if (!box.value.trim()) throw new BoxError(box, `Paste ${what} here.`);
  try {
    return JSON.parse(box.value);
  } catch (error) {
    throw new BoxError(box, `This is not JSON: ${error.message}`);
  }
}

function schemaIn(box) {
  const found = parsed(box, "a JSON schema");
  if (!isObject(found)) throw new BoxError(box, "A schema is a JSON object, such as {\"type\": \"object\"}.");
  return found;
}

/** Tools as OpenAI's interface has them; functions may be given bare, and one without a list. */
function toolsIn(box) {
  const found = parsed(box, "a list of functions");
  const tools = (Array.isArray(found) ? found : [found]).map((one) => (isObject(one?.function) ? one : { type: "function", function: one }));
  const wrong = tools.findIndex((one) => typeof one.function?.name !== "string");
  if (wrong >= 0) throw new BoxError(box, `Function ${wrong + 1} has no name: {"name": "weather", "parameters": {...}}.`);
  return tools;
}

/** Read an area of the page: `read()` gives fields of a request, or throws a BoxError; notes follow what is typed. */
export function shape(area, chat) {
  const at = (name) => area.querySelector(`#${name}`);
  const [answer, schema, tools, choice] = ["answer", "schema", "tools", "choice"].map(at);

  function noted(box, work, good) {
    const note = at(`${box.id}-note`);
    let wrong = "";
    if (!box.disabled) {
      try {
        note.textContent = box.value.trim() ? good(work(box)) : "";
      } catch (error) {
        note.textContent = wrong = error.message;
      }
    }
    box.setAttribute("aria-invalid", String(Boolean(wrong)));
  }

  function show() {
    at("schema-field").hidden = answer.value !== "json_schema";
    at("tools-field").hidden = !chat();
    at("choice-field").hidden = !chat() || !tools.value.trim();
    noted(schema, schemaIn, () => "");
    noted(tools, toolsIn, (found) => `Functions: ${found.map((one) => one.function.name).join(", ")}`);
  }

  area.addEventListener("input", show);
  return {
    show,
    /** Say why the pair has no JSON, or no tools; null: it has. */
    offered(json, calls) {
      for (const [box, why] of [[answer, json], [tools, calls]]) {
        box.disabled = Boolean(why);
        at(`${box.id}-note`).textContent = why ?? "";
      }
      if (json) answer.value = "text";
      if (calls) tools.value = "";
      show();
    },
    read() {
      const found = {};
      if (answer.value === "json_object") found.response_format = { type: "json_object" };
      if (answer.value === "json_schema") {
        found.response_format = { type: "json_schema", json_schema: { name: "answer", schema: schemaIn(schema) } };
      }
      if (chat() && tools.value.trim()) {
        Object.assign(found, { tools: toolsIn(tools), tool_choice: choice.value });
        if (choice.value === "required") found.parallel_tool_calls = false; // one
      }
      return found;
    },
  };
}

/** A call as a card: name and arguments. */
export function card(call) {
  const place = document.createElement("section");
  place.className = "call";
  place.setAttribute("aria-label", `Call of ${call.function.name}`);
  const shown = document.createElement("pre");
  try {
    shown.textContent = JSON.stringify(JSON.parse(call.function.arguments), null, 2);
  } catch {
    shown.textContent = call.function.arguments;
  }
  place.append(Object.assign(document.createElement("h4"), { textContent: call.function.name }), shown);
  return place;
}

/** A box for the result of each call; `send(messages)` gets them as messages of the role tool. */
export function results(calls, send) {
  const form = document.createElement("form");
  form.className = "results";
  const boxes = calls.map((call) => {
    const label = Object.assign(document.createElement("label"), { textContent: `Result of ${call.function.name} ` });
    const box = Object.assign(document.createElement("textarea"), { rows: 2, required: true, spellcheck: false });
    label.append(box);
    form.append(label);
    return box;
  });
  form.append(Object.assign(document.createElement("button"), { type: "submit", textContent: "Send the result" }));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send(calls.map((call, i) => ({ role: "tool", tool_call_id: call.id, content: boxes[i].value })));
  });
  return form;
}
