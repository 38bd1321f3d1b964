// Requests to the server this page came from, and its events.

let key = sessionStorage.getItem("sprinter-key") ?? "";

export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

function headers() {
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

/** Ask for an API key until the server takes one; `show()` resolves with what the user typed. */
export async function withKey(work, show) {
  for (;;) {
    try {
      return await work();
    } catch (error) {
      if (error.status !== 401) throw error;
      const given = await show();
      if (!given) throw error;
      key = given;
      sessionStorage.setItem("sprinter-key", key);
    }
  }
}

async function checked(response) {
  if (response.ok) return response;
  let message = `the server answered ${response.status}`;
  try {
    message = (await response.json()).error.message ?? message;
  } catch {
    // not JSON: the status says it all
  }
  throw new ServerError(message, response.status);
}

async function get(path) {
  return (await checked(await fetch(path, { headers: headers() }))).json();
}

export const getPair = (model) => get(model ? `page/pair?model=${encodeURIComponent(model)}` : "page/pair");

export const getModels = async () => (await get("v1/models")).data.map((one) => one.id);

/** Events of a streamed answer, as objects, until [DONE]. An error event is thrown. */
export async function* stream(path, body, signal) {
  const init = { method: "POST", headers: headers(), body: JSON.stringify(body), signal };
  const response = await checked(await fetch(path, init));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new ServerError("the answer broke off", 0);
    rest += value;
    const events = rest.split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue;
      const data = event.slice(6);
      if (data === "[DONE]") return;
      const found = JSON.parse(data);
      if (found.error) throw new ServerError(found.error.message, found.error.code ?? 0);
      yield found;
    }
  }
}
