/** The chat page: the conversation on the screen, the composer, and the list of conversations. */

import { ApiError, chunks, get, post, remove, setKey } from "./api.js";
import { announce, cycleTheme, h, setAttribute, setText } from "./dom.js";
import { count, number, plural, span } from "./format.js";
import { visible } from "./markdown.js";
import { messageNode } from "./messages.js";
import { askKey, editSettings, requestFields } from "./settings.js";
import * as store from "./store.js";

const $ = (id) => document.getElementById(id);
const SAVED_MS = 2000; // time between saves of an answer that grows
const NEAR_END = 80; // pixels from the end within which the page follows the answer
const USAGE_MS = 10_000; // time between looks at the running requests of the key
const MAX_STEPS = 4000; // trips of an answer whose times are kept
const MAX_GAPS = 3; // missing ranges of blocks that the list of models names

let settings = store.settings();
let chat = store.newChat();
let drawnModels = ""; // the list of models as the page shows it
let running = null; // {abort, message} of the answer that grows

const scroller = $("main");
const isAtEnd = () => scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < NEAR_END;
const toEnd = () => { scroller.scrollTop = scroller.scrollHeight; };

// ---- the conversation -------------------------------------------------------------------------

const nodes = new WeakMap();

function draw() {
  const log = $("log");
  const wanted = chat.messages.map(nodeOf);
  let same = 0;
  while (same < wanted.length && log.children[same] === wanted[same]) same += 1;
  while (log.children.length > same) log.lastChild.remove();
  log.append(...wanted.slice(same)); // nodes that stay keep their layout
  document.body.classList.toggle("empty", chat.messages.length === 0);
  document.title = `${chat.title || "Chat"} · swarmnet`;
  setText($("title"), chat.title || "Chat");
  drawChats();
  toEnd();
}

function nodeOf(message) {
  if (!nodes.has(message)) nodes.set(message, messageNode(message, { edit, regenerate, result }));
  return nodes.get(message);
}

function open(id) {
  if (running && chat.id !== id) stop();
  chat = store.load(id) ?? store.newChat();
  draw();
  closeSide();
  $("question").focus();
}

function edit(message, text) {
  const at = chat.messages.indexOf(message);
  stop();
  chat.messages.length = at;
  if (at === 0) chat.title = "";
  send({ role: "user", content: text });
}

function regenerate(message) {
  const at = chat.messages.indexOf(message);
  stop();
  chat.messages.length = at;
  answer();
}

function result(message, call, text) {
  call.answered = true;
  const said = { role: "tool", content: text, call_id: call.id, name: call.name };
  chat.messages.push(said);
  nodeOf(message).update();
  if (message.calls.every((each) => each.answered)) answer();
  else draw();
}

function send(message) {
  chat.messages.push(message);
  chat.title ||= message.content.trim().split("\n")[0].slice(0, 60);
  answer();
}

function stop() {
  running?.abort.abort();
}

// ---- an answer --------------------------------------------------------------------------------

async function answer() {
  const message = { role: "assistant", content: "", busy: true };
  const abort = new AbortController();
  const mine = { abort, message, chat };
  const asked = body();
  running = mine;
  chat.messages.push(message);
  draw();
  busy(true);
  let frame = 0;
  let saved_ms = performance.now();
  const show = () => {
    frame = 0;
    const follows = isAtEnd();
    nodeOf(message).update();
    if (follows) toEnd();
    $("to-end").hidden = isAtEnd();
    if (performance.now() - saved_ms > SAVED_MS) {
      saved_ms = performance.now();
      store.save(mine.chat);
    }
  };
  try {
    for await (const chunk of chunks(asked, abort.signal)) {
      take(message, chunk, mine);
      frame ||= requestAnimationFrame(show);
    }
    announce("The answer is complete.");
  } catch (error) {
    if (abort.signal.aborted) message.reason = "stopped";
    else if (!(error instanceof ApiError)) throw error;
    else {
      message.error = error.again_s ? `${error.message} Try again in ${plural(error.again_s, "second")}.` : error.message;
      if (error.status === 401) whenKeyGiven(true).then((given) => given && regenerate(message));
    }
  } finally {
    cancelAnimationFrame(frame);
    message.busy = false;
    finish(mine);
    show();
  }
}

function finish(mine) {
  if (!store.save(mine.chat)) announce("This browser could not store the conversation.");
  if (running === mine) {
    running = null;
    busy(false);
    drawUsage();
  }
  drawChats();
}

/** The request for the next answer of the conversation. */
function body() {
  const messages = chat.messages.filter((each) => each.role !== "assistant" || each.content || each.calls?.length).map(forModel);
  if (settings.system) messages.unshift({ role: "system", content: settings.system });
  return { model: $("model").value, messages, stream: true, stream_options: { include_usage: true, include_trace: true }, ...requestFields(settings) };
}

function forModel({ role, content, calls, call_id }) {
  if (role === "tool") return { role, content, tool_call_id: call_id };
  const tool_calls = calls?.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
  return tool_calls?.length ? { role, content, tool_calls } : { role, content };
}

/** Adds a chunk of a stream to a message. */
function take(message, chunk, mine) {
  const now = performance.now() / 1000;
  mine.began_s ??= now;
  if (chunk.prefill) { message.prefill = chunk.prefill; return; }
  mine.request = chunk.id;
  const figures = message.figures ??= { tokens: 0, trips: 0, first_s: now - mine.began_s, whole_s: 0 };
  const [choice] = chunk.choices;
  const { delta = {}, finish_reason } = choice ?? {};
  if (delta.content) message.content += delta.content;
  if (delta.reasoning_content) message.reasoning = (message.reasoning ?? "") + delta.reasoning_content;
  for (const part of delta.tool_calls ?? []) {
    const calls = message.calls ??= [];
    const call = calls[part.index] ??= { id: part.id, name: "", arguments: "" };
    call.name += part.function.name ?? "";
    call.arguments += part.function.arguments ?? "";
  }
  if (finish_reason) message.reason = finish_reason;
  trace(message, chunk.swarmnet ?? {}, delta.content ?? delta.reasoning_content ?? "", mine);
  if (chunk.usage) {
    figures.tokens = chunk.usage.completion_tokens;
    figures.trips = chunk.usage.trips;
  } else if (choice) figures.whole_s = now - mine.began_s;
}

/** Adds the times that a chunk has, and finds the text of each trip. */
function trace(message, { tokens = 0, route, steps = [] }, text, mine) {
  const pieces = mine.pieces ??= []; // [last token, text] of each chunk
  message.figures.tokens += tokens;
  if (tokens) pieces.push([message.figures.tokens, text]);
  if (route) message.route = route;
  const kept = message.steps ??= [];
  for (const step of steps) {
    const from = mine.brought ?? 0;
    mine.brought = from + step.tokens;
    step.text = pieces.filter(([last]) => last > from && last <= mine.brought).map(([, each]) => each).join("");
    message.figures.trips += step.tokens > 0 ? 1 : 0;
    if (kept.length < MAX_STEPS) kept.push(step);
  }
}

// ---- around it --------------------------------------------------------------------------------

function busy(on) {
  $("stop").hidden = !on;
  $("send").hidden = on;
  setAttribute(scroller, "aria-busy", on ? "true" : "false");
}

function drawChats() {
  const list = store.chats();
  $("chats").replaceChildren(...list.map(({ id, title }) => h("li", {},
    h("button", { type: "button", class: "chat-title", "aria-current": id === chat.id ? "page" : null, onclick: () => open(id) }, title || "Chat"),
    h("button", { type: "button", class: "icon-button", "aria-label": `Delete ${title || "Chat"}`, onclick: () => forget(id) }, "✕"))));
}

function forget(id) {
  store.remove(id);
  if (id === chat.id) {
    chat.deleted = true;
    stop();
    chat = store.newChat();
    draw();
  } else drawChats();
  $("new").focus();
}

function closeSide() {
  document.body.classList.remove("side-open");
  setAttribute($("open-side"), "aria-expanded", "false");
}

function grow() {
  const input = $("question");
  input.style.setProperty("height", "auto");
  input.style.setProperty("height", `${Math.min(input.scrollHeight, innerHeight * 0.4)}px`);
}

async function whenKeyGiven(wasWrong = false) {
  const key = await askKey(wasWrong);
  if (!key) return false;
  setKey(key);
  return true;
}

/** The options of models. Those of adapters stand below the model that they change. */
function modelOptions(models, chosen) {
  const option = (model) => h("option", { value: model.id, disabled: model.available === false, selected: model.available !== false && model.id === chosen }, modelText(model));
  const isAdapter = ({ parent }) => models.some(({ id }) => id === parent);
  return models.filter((model) => !isAdapter(model)).flatMap((model) => {
    const adapted = models.filter(({ parent }) => parent === model.id);
    return [option(model), adapted.length ? h("optgroup", { label: `Adapters of ${visible(model.id)}` }, adapted.map(option)) : null];
  }).filter(Boolean);
}

/** The name of a model, and what a forming one lacks. */
function modelText({ id, available, blocks, missing_blocks: missing = [], missing_gb: size }) {
  const name = visible(id); // hosts choose it
  if (available !== false) return name;
  const listed = missing.slice(0, MAX_GAPS).map(span).join(", ") + (missing.length > MAX_GAPS ? " …" : "");
  return `${name} (forming: nobody hosts blocks ${listed} of ${blocks}${size ? `, ${number(size)} GB` : ""})`;
}

/** Loads the models. At first, asks for a key as long as the endpoint wants one. */
async function loadModels(isFirst) {
  for (let asked = false; ; asked = true) {
    try {
      drawModels((await get("/v1/models")).data);
      return;
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      if (!isFirst) return; // the next look may succeed
      if (error.status !== 401) { announce(error.message); $("model").replaceChildren(h("option", {}, "no model")); return; }
      if (!await whenKeyGiven(asked)) { $("model").replaceChildren(h("option", {}, "no key")); return; }
    }
  }
}

/** Shows the models. Leaves an equal list alone, because the reader may have it open. */
function drawModels(models) {
  const shown = JSON.stringify(models.map((model) => [model.id, model.parent, modelText(model)]));
  if (shown === drawnModels) return;
  $("model").replaceChildren(...modelOptions(models, drawnModels ? $("model").value : settings.model));
  drawnModels = shown;
}

/** Shows what this key has used, and its running requests, which it can cancel. */
async function drawUsage() {
  let usage;
  try {
    usage = await get("/v1/usage");
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    return; // the next look may succeed
  }
  const { requests, prompt_tokens, completion_tokens, cached_tokens, running: others } = usage;
  $("usage").hidden = !requests;
  $("usage").replaceChildren(
    h("p", {}, `${plural(requests, "request")} · ${count(prompt_tokens)} tokens read, ${count(cached_tokens)} of them cached · ${count(completion_tokens)} written`),
    h("ul", {}, others.map(({ id, model, completion_tokens: written }) => h("li", {}, h("span", {}, `${visible(model)}: ${plural(written, "token")}`),
      h("button", { type: "button", class: "quiet-button", "aria-label": `Cancel the request to ${visible(model)}`, onclick: () => remove(`/v1/usage/${encodeURIComponent(id)}`).catch((error) => announce(error.message)).finally(drawUsage) }, "Cancel")))));
}

/** Kills a host of the answer. Only the page of a demo has the button. */
async function kill() {
  const message = running?.message ?? chat.messages.findLast((each) => each.route);
  const hops = message?.route ?? [];
  const peer = (hops[Math.floor(hops.length / 2)] ?? { peer: "" }).peer;
  try {
    await post("/demo/kill", { peer });
    announce("A host was killed.");
    if (running && peer) { running.message.killed = peer; nodeOf(running.message).update(); }
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    announce(error.message);
  }
}

function wire() {
  cycleTheme($("theme"));
  const input = $("question");
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    const content = input.value;
    if (!content.trim() || running) return;
    input.value = "";
    grow();
    send({ role: "user", content });
  });
  input.addEventListener("input", grow);
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); $("composer").requestSubmit(); }
    if (event.key === "ArrowUp" && !input.value) [...$("log").querySelectorAll(".question")].at(-1)?.edit();
  });
  $("stop").addEventListener("click", stop);
  $("new").addEventListener("click", () => { stop(); chat = store.newChat(); draw(); closeSide(); input.focus(); });
  $("to-end").addEventListener("click", () => { toEnd(); input.focus(); });
  scroller.addEventListener("scroll", () => { $("to-end").hidden = isAtEnd(); }, { passive: true });
  $("open-side").addEventListener("click", () => {
    const isOpen = document.body.classList.toggle("side-open");
    setAttribute($("open-side"), "aria-expanded", String(isOpen));
    if (isOpen) $("new").focus();
  });
  $("close-side").addEventListener("click", () => { closeSide(); $("open-side").focus(); });
  $("open-settings").addEventListener("click", () => editSettings(settings, (next) => {
    settings = { ...next, model: settings.model };
    store.saveSettings(settings);
  }));
  for (const target of [window, $("model")]) target.addEventListener("focus", () => loadModels(false));
  $("model").addEventListener("change", () => { settings.model = $("model").value; store.saveSettings(settings); });
  addEventListener("keydown", (event) => {
    if (document.querySelector("dialog[open]")) return;
    if (event.key === "Escape") running ? stop() : closeSide();
    if (event.key === "/" && !/^(TEXTAREA|INPUT|SELECT)$/.test(document.activeElement.tagName)) { event.preventDefault(); input.focus(); }
  });
  $("kill").hidden = location.hash !== "#demo";
  $("kill").addEventListener("click", kill);
  setInterval(() => { if (document.visibilityState === "visible") drawUsage(); }, USAGE_MS);
  addEventListener("pagehide", () => { if (running) store.save(running.chat); });
}

async function main() {
  wire();
  draw();
  setAttribute(scroller, "aria-busy", "false");
  await loadModels(true);
  drawUsage();
  if (!document.querySelector("dialog[open]")) $("question").focus();
}

main();
