/** Draws the messages of a conversation. A message keeps its node while its answer grows. */

import { chainNode } from "./chain.js";
import { copyButton, h, setText } from "./dom.js";
import { count, number, plural, seconds } from "./format.js";
import { markdownNode, visible } from "./markdown.js";

/**
 * The node of a message. `actions`: edit(message, text), regenerate(message), result(message, call, text).
 * `node.update()` draws what changed in the message.
 */
export function messageNode(message, actions) {
  if (message.role === "user") return questionNode(message, actions);
  if (message.role === "tool") return resultNode(message);
  return answerNode(message, actions);
}

function questionNode(message, { edit }) {
  const text = h("div", { class: "said" });
  const shown = h("div", { class: "shown" }, text, h("div", { class: "actions" },
    h("button", { type: "button", class: "quiet-button", onclick: () => begin() }, "Edit"),
    copyButton("Copy the message", text)));
  const input = h("textarea", { "aria-label": "Edit the message", rows: "3" });
  const form = h("form", { class: "edit", hidden: true }, input, h("div", { class: "actions" },
    h("button", { type: "button", class: "quiet-button", onclick: () => end() }, "Cancel"),
    h("button", { type: "submit", class: "quiet-button strong" }, "Send")));
  const node = h("article", { class: "message question", "aria-label": "You" }, shown, form);

  function begin() {
    input.value = message.content;
    shown.hidden = true;
    form.hidden = false;
    input.focus();
  }
  function end() {
    shown.hidden = false;
    form.hidden = true;
    shown.querySelector("button").focus();
  }
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (input.value.trim()) edit(message, input.value);
  });
  input.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { event.stopPropagation(); end(); }
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); form.requestSubmit(); }
  });
  node.update = () => setText(text, visible(message.content));
  node.edit = begin;
  node.update();
  return node;
}

function resultNode(message) {
  const node = h("article", { class: "message", "aria-label": "Result of a tool" }, fold("Result", visible(message.name ?? ""), h("pre", { tabindex: "0" }, visible(message.content))));
  node.update = () => {};
  return node;
}

function fold(title, detail, ...content) {
  return h("details", { class: "fold" }, h("summary", {}, h("strong", {}, title), detail ? ` ${detail}` : null), content);
}

function answerNode(message, { regenerate, result }) {
  const thoughts = h("div", { class: "thoughts-text" });
  const about = h("span", {});
  const thinking = h("details", { class: "fold", hidden: true }, h("summary", {}, about), thoughts);
  const calls = h("div", { class: "calls" });
  const text = markdownNode();
  const waiting = h("p", { class: "waiting" });
  const failure = h("p", { class: "failure", role: "alert", hidden: true });
  const chain = chainNode(message);
  const figures = h("span", { class: "figures" });
  const again = h("button", { type: "button", class: "quiet-button", onclick: () => regenerate(message) }, "Regenerate");
  const copy = copyButton("Copy the answer", text, () => visible(message.content));
  const foot = h("footer", { class: "foot", hidden: true }, h("div", { class: "foot-line" }, figures, h("div", { class: "actions" }, copy, again)), chain);
  const node = h("article", { class: "message answer", "aria-label": "Answer" }, thinking, text, calls, waiting, failure, foot);

  node.update = () => {
    thinking.hidden = !message.reasoning;
    if (message.reasoning) {
      setText(about, message.busy && !message.content && !message.calls?.length ? "Thinking …" : "Thoughts");
      setText(thoughts, visible(message.reasoning));
    }
    text.setMarkdown(message.content);
    text.classList.toggle("growing", Boolean(message.busy && message.content));
    drawCalls();
    const waits = message.busy && !message.content && !message.reasoning && !message.calls?.length;
    waiting.hidden = !waits;
    setText(waiting, waits ? (message.prefill ? `Reading the prompt: ${count(message.prefill[0])} of ${plural(message.prefill[1], "token")}` : "Waiting for the first token") : "");
    failure.hidden = !message.error;
    setText(failure, message.error ?? "");
    setText(figures, figuresText(message));
    again.hidden = copy.hidden = Boolean(message.busy);
    foot.hidden = Boolean(waits && !message.route);
    chain.update();
  };

  function drawCalls() {
    const wanted = message.calls ?? [];
    while (calls.children.length > wanted.length) calls.lastChild.remove();
    wanted.forEach((call, at) => {
      const drawn = calls.children[at] ?? calls.appendChild(callNode(call));
      drawn.update();
    });
  }

  function callNode(call) {
    const name = h("code", {});
    const given = h("pre", { tabindex: "0" });
    const input = h("textarea", { rows: "2", "aria-label": "Result of the call" });
    const form = h("form", { class: "edit", hidden: true }, input, h("div", { class: "actions" }, h("button", { type: "submit", class: "quiet-button strong" }, "Send the result")));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      result(message, call, input.value);
    });
    const each = h("details", { class: "fold" }, h("summary", {}, "Calls ", name), given, form);
    each.update = () => {
      setText(name, visible(call.name));
      setText(given, visible(call.arguments));
      form.hidden = Boolean(message.busy || call.answered || message.reason !== "tool_calls");
    };
    return each;
  }

  node.update();
  return node;
}

/** The numbers under an answer. */
export function figuresText({ figures, busy, reason }) {
  if (!figures?.tokens) return "";
  const { tokens, trips, first_s, whole_s } = figures;
  const decoding_s = whole_s - first_s;
  const parts = [];
  if (tokens > 1 && decoding_s > 0) parts.push(`${number((tokens - 1) / decoding_s)} tokens/s`);
  if (trips) parts.push(tokens === trips ? "1 token a trip" : `${number(tokens / trips)} tokens a trip`);
  parts.push(plural(tokens, "token"));
  if (!busy) parts.push(`first after ${seconds(first_s)}`);
  if (reason === "length") parts.push("cut off at the limit");
  if (reason === "stopped") parts.push("stopped");
  return parts.join(" · ");
}
