/** The health of a model in a sentence, and its main figures. */

import { h, setAttribute, setText } from "../dom.js";
import { count, durationParts, number } from "../format.js";
import { EXPLANATIONS, health } from "../words.js";

/** `update(model)` fills it with the JSON of a model. */
export function headline() {
  const symbol = h("span", { class: "health-symbol", "aria-hidden": "true" });
  const title = h("h1", {});
  const text = h("p", { class: "health-text" });
  const state = h("div", { class: "health" }, symbol, h("div", {}, title, text));
  const [speed, peers, sessions, first, each] = ["Speed", "Peers", "Sessions", "First token", "Each token"].map(figure);
  return {
    node: h("div", { class: "headline" }, state, h("dl", { class: "figures" }, [speed, peers, sessions, first, each].map((one) => one.node))),
    update(model) {
      const words = health(model);
      setAttribute(state, "data-kind", words.kind);
      setText(symbol, words.symbol);
      setText(title, words.title);
      setText(text, words.text);
      speed.set([number(model.tokens_per_s), "tokens/s"], "all clients together");
      peers.set([count(model.peers), ""]);
      sessions.set([count(model.sessions), ""], `most in 24 h: ${count(model.peak_sessions)}`);
      times(first, model.first_token_s);
      times(each, model.token_s);
    },
  };
}

function times(target, quantiles) {
  target.set(durationParts(quantiles?.p50), quantiles ? `95 % within ${durationParts(quantiles.p95).join("\u202f")}` : "none seen in 5 min");
}

function figure(name) {
  const value = h("span", { class: "value" });
  const unit = h("span", { class: "unit" });
  const aside = h("span", { class: "aside" });
  return {
    node: h("div", { title: EXPLANATIONS[name] }, h("dt", {}, name), h("dd", {}, value, unit, aside)),
    set([digits, of], more = "") {
      setText(value, digits);
      setText(unit, of);
      setText(aside, more);
    },
  };
}
