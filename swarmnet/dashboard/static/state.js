/** Receives the swarm's state from the server: the whole state once, then JSON Merge Patches (RFC 7386). */

const SILENCE_MS = 15_000; // patches come every 2 s; after this long without one the connection is taken for dead
const FIRST_RETRY_MS = 1_000;
const LAST_RETRY_MS = 20_000;
const POLL_MS = 10_000; // between two loads of the state while the server has no free place for a live viewer

/** `target` with `patch` applied. Neither is modified; unchanged parts are shared. */
export function applyPatch(target, patch) {
  if (!isObject(patch)) return patch;
  const result = isObject(target) ? { ...target } : {};
  for (const [name, value] of Object.entries(patch)) {
    if (name === "__proto__") continue;
    if (value === null) delete result[name];
    else result[name] = applyPatch(result[name], value);
  }
  return result;
}

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

/** Milliseconds before the next attempt after `failures` (1, 2, …) in a row; `random` in [0, 1) spreads the viewers. */
export const retryDelay = (failures, random) =>
  Math.min(LAST_RETRY_MS, FIRST_RETRY_MS * 2 ** (failures - 1)) * (0.75 + random / 2);

/**
 * Receives states until the page is closed. Calls `onState(state)` with every new state and
 * `onLink({state: "live" | "polled" | "lost", since_s, retry_ms})` when the connection changes. Polled: the server answers, but has
 * reached its limit of event streams.
 */
export function follow(onState, onLink) {
  let state = null;
  let source = null;
  let attempts = 0;
  let failures = 0;
  let timer = 0; // of the watchdog, or of the next attempt
  let lost_since_s = null;
  let live = false; // whether this connection has delivered an event

  function stop() {
    attempts += 1;
    clearTimeout(timer);
    source?.close();
  }

  function restartWatchdog() {
    clearTimeout(timer);
    timer = setTimeout(lost, SILENCE_MS);
  }

  function received(next) {
    restartWatchdog();
    state = next;
    lost_since_s = null;
    failures = 0;
    live = true;
    onLink({ state: "live" });
    onState(state);
  }

  function polled() {
    stop();
    failures = 0;
    lost_since_s = null;
    const retry_ms = POLL_MS * (0.75 + Math.random() / 2);
    onLink({ state: "polled", since_s: Date.now() / 1000, retry_ms });
    timer = setTimeout(connect, retry_ms);
  }

  function lost() {
    stop();
    failures += 1;
    lost_since_s ??= Date.now() / 1000;
    const retry_ms = retryDelay(failures, Math.random());
    onLink({ state: "lost", since_s: lost_since_s, retry_ms });
    timer = setTimeout(connect, retry_ms);
  }

  async function connect() {
    stop();
    restartWatchdog();
    const number = attempts;
    const answer = await fetched("/api/v1/state"); // fetched, not sent as the first event: responses are compressed, events are not
    if (number !== attempts) return; // another attempt has begun
    if (!answer) {
      lost();
      return;
    }
    state = answer.body;
    live = false;
    onState(state);
    source = new EventSource(`/api/v1/events?have=${encodeURIComponent(answer.etag)}`);
    source.addEventListener("state", (event) => received(JSON.parse(event.data)));
    source.addEventListener("patch", (event) => received(applyPatch(state, JSON.parse(event.data))));
    source.addEventListener("error", () => (live ? lost() : polled()));
  }

  addEventListener("pagehide", stop);
  addEventListener("pageshow", (event) => { if (event.persisted) connect(); });
  connect();
}

/** {body, etag}, or null if the server does not answer. */
async function fetched(url) {
  try {
    const answer = await fetch(url);
    return answer.ok ? { body: await answer.json(), etag: answer.headers.get("etag") ?? "" } : null;
  } catch {
    return null;
  }
}
