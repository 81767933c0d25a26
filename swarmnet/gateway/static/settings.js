/** The dialogs: settings of conversations, and the key of the endpoint. */

import { h } from "./dom.js";

/** Sampling settings: name, label, attributes of the input, and help. The model decides about an empty one. */
const NUMBERS = [
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.05 }, "0 always takes the likeliest token; more varies answers"],
  ["top_p", "Top p", { min: 0.01, max: 1, step: 0.01 }, "choose among the likeliest tokens, up to this share of the probability"],
  ["top_k", "Top k", { min: 0, max: 1000, step: 1 }, "choose among this many of the likeliest tokens"],
  ["min_p", "Min p", { min: 0, max: 1, step: 0.01 }, "leave out tokens below this share of the likeliest one's probability"],
  ["repetition_penalty", "Repetition penalty", { min: 0.5, max: 2, step: 0.05 }, "more than 1 avoids repeated tokens"],
  ["max_tokens", "Longest answer", { min: 1, step: 1 }, "in tokens"],
  ["seed", "Seed", { step: 1 }, "the same seed repeats an answer"],
];

/** The fields of a request that the settings give. */
export function requestFields(settings) {
  const fields = {};
  for (const [name] of NUMBERS) if (Number.isFinite(settings[name])) fields[name] = settings[name];
  if (settings.reasoning_effort) fields.reasoning_effort = settings.reasoning_effort;
  if (settings.tools?.length) fields.tools = settings.tools;
  return fields;
}

function dialog(title, form, ...buttons) {
  const close = h("button", { type: "button", class: "quiet-button", onclick: () => node.close() }, "Cancel");
  form.append(h("div", { class: "actions" }, close, buttons));
  const heading = h("h2", { id: `dialog-${title.replace(/\W/g, "-")}` }, title);
  const node = h("dialog", { "aria-labelledby": heading.id }, heading, form);
  document.body.append(node);
  node.addEventListener("close", () => node.remove());
  node.showModal();
  return node;
}

/** Lets the reader change settings. Calls `done(settings)`. */
export function editSettings(settings, done) {
  const system = h("textarea", { id: "system", rows: "4" }, settings.system ?? "");
  const inputs = NUMBERS.map(([name, label, attributes, help]) => {
    const input = h("input", { id: name, type: "number", inputmode: "decimal", placeholder: "default", "aria-describedby": `${name}-help`, ...attributes });
    if (Number.isFinite(settings[name])) input.value = settings[name];
    return { name, input, node: h("div", { class: "setting" }, h("label", { for: name }, label), input, h("small", { id: `${name}-help` }, help)) };
  });
  const effort = h("select", { id: "reasoning_effort" }, [["", "default"], ["none", "none"], ["low", "low"], ["medium", "medium"], ["high", "high"]].map(([value, text]) => h("option", { value, selected: value === (settings.reasoning_effort ?? "") }, text)));
  const tools = h("textarea", { id: "tools", rows: "3", spellcheck: "false", placeholder: "[{\"type\": \"function\", \"function\": {\"name\": …}}]" }, settings.tools ? JSON.stringify(settings.tools, null, 2) : "");
  const wrong = h("p", { class: "failure", role: "alert", hidden: true });
  const form = h("form", { class: "settings" },
    h("label", { for: "system" }, "System prompt"), system,
    h("div", { class: "setting-grid" }, inputs.map(({ node: each }) => each),
      h("div", { class: "setting" }, h("label", { for: "reasoning_effort" }, "Reasoning"), effort, h("small", {}, "for models that think before they answer"))),
    h("details", { class: "fold", open: Boolean(settings.tools) }, h("summary", {}, "Tools"), h("label", { for: "tools" }, "Functions that the model may call, as JSON. You type their results."), tools), wrong);
  const node = dialog("Settings", form,
    h("button", { type: "button", class: "quiet-button", onclick: () => { form.reset(); for (const each of form.elements) if ("value" in each && each.type !== "button" && each.type !== "submit") each.value = ""; } }, "Clear"),
    h("button", { type: "submit", class: "quiet-button strong" }, "Save"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const next = { system: system.value.trim(), reasoning_effort: effort.value };
    for (const { name, input } of inputs) if (input.value !== "") next[name] = input.valueAsNumber;
    try {
      const given = tools.value.trim() ? JSON.parse(tools.value) : null;
      if (given && !Array.isArray(given)) throw new SyntaxError("it is not a list");
      if (given) next.tools = given;
    } catch (error) {
      wrong.textContent = `The tools must be a JSON list: ${error.message}`;
      wrong.hidden = false;
      return;
    }
    node.close();
    done(next);
  });
}

/** Asks for the key of the endpoint. Resolves with it, or with null if the reader cancels. */
export function askKey(wasWrong) {
  return new Promise((resolve) => {
    const input = h("input", { id: "key", type: "password", autocomplete: "off", required: true });
    const form = h("form", { class: "settings" },
      wasWrong ? h("p", { class: "failure", role: "alert" }, "The endpoint does not know this key.") : null,
      h("label", { for: "key" }, "API key of this endpoint"), input, h("small", {}, "This tab forgets it when you close it."));
    const node = dialog("A key is needed", form, h("button", { type: "submit", class: "quiet-button strong" }, "Use the key"));
    let key = null;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      key = input.value.trim();
      node.close();
    });
    node.addEventListener("close", () => resolve(key));
  });
}
