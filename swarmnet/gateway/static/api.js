/** Talks to the endpoint that serves this page. The key stays in this tab (sessionStorage). */

const KEY = "swarmnet.key";
const MAX_LINE = 4 << 20; // characters of one event; longer ones end the answer

export class ApiError extends Error {
  /** `again_s`: seconds after which a new attempt may succeed. */
  constructor(message, { status = 0, again_s = null } = {}) {
    super(message);
    Object.assign(this, { status, again_s });
  }
}

let key = null;
try {
  key = sessionStorage.getItem(KEY);
} catch {
  // Storage is disabled: the key lasts until the page is closed or loaded again.
}

export function setKey(given) {
  key = given;
  try {
    sessionStorage.setItem(KEY, given);
  } catch {
    // As above.
  }
}

const headers = () => (key ? { authorization: `Bearer ${key}` } : {});

async function ask(path, options = {}) {
  let answer;
  try {
    answer = await fetch(path, { ...options, headers: { ...headers(), ...options.headers } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The endpoint does not answer. Is it still running?");
  }
  if (answer.ok) return answer;
  let message = `The endpoint answered ${answer.status}.`;
  try {
    const { error } = await answer.json();
    message = error.message || message;
  } catch {
    // Not an error object: its status says enough.
  }
  throw new ApiError(message, { status: answer.status, again_s: Number(answer.headers.get("retry-after")) || null });
}

export const get = async (path) => (await ask(path)).json();

export const post = (path, body, options = {}) =>
  ask(path, { ...options, method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });

export const remove = (path) => ask(path, { method: "DELETE" });

/** Yields the chunks of a streamed chat, and {prefill: [done, total]} while a long prompt is read. Throws `ApiError`. */
export async function* chunks(body, signal) {
  const answer = await post("/v1/chat/completions", body, { signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (signal.aborted) throw error;
      throw new ApiError("The connection was lost in the middle of the answer.");
    }
    if (part.done) throw new ApiError("The connection ended in the middle of the answer.");
    rest += part.value;
    const lines = rest.split("\n");
    rest = lines.pop();
    if (rest.length > MAX_LINE) {
      reader.cancel();
      throw new ApiError("The endpoint sent an event that is too long.");
    }
    for (const line of lines) {
      const prefill = /^: prefill (\d+)\/(\d+)$/.exec(line);
      if (prefill) yield { prefill: [Number(prefill[1]), Number(prefill[2])] };
      if (!line.startsWith("data: ")) continue;
      const data = line.slice(6);
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.message);
      yield chunk;
    }
  }
}
