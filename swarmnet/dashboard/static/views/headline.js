/** How a model is, in a sentence and in numbers. */

import { h, setAttribute, setText } from "../dom.js";
import { count, measured, number } from "../format.js";
import { health } from "../words.js";

/** `update(model)` fills it; the model is null where the swarm hosts none. */
export function headline() {
  const symbol = h("span", { class: "health-symbol", "aria-hidden": "true" });
  const title = h("h1", {});
  const text = h("p", { class: "health-text" });
  const state = h("div", { class: "health" }, symbol, h("div", {}, title, text));
  const speed = figure("Speed", "Tokens that the hosts compute each second, as this page observes it");
  const peers = figure("Peers", "Peers that host blocks of this model");
  const sessions = figure("Sessions", "Answers in progress, and the most there were");
  const first = figure("First token", "From the question to the first token: half of all were faster than p50, 95 % faster than p95");
  const each = figure("Each token", "From one token to the next: half of all were faster than p50, 95 % faster than p95");
  return {
    node: h("div", { class: "headline" }, state, h("dl", { class: "figures" }, [speed, peers, sessions, first, each].map((one) => one.node))),
    update(model) {
      const words = health(model);
      setAttribute(state, "data-kind", words.kind);
      setText(symbol, words.symbol);
      setText(title, words.title);
      setText(text, words.text);
      speed.set([number(model.tokens_per_s), "tokens/s"]);
      peers.set([count(model.peers), ""]);
      sessions.set([count(model.sessions), ""], typeof model.peak_sessions === "number" ? `peak ${count(model.peak_sessions)}` : "");
      times(first, model.first_token_s);
      times(each, model.token_s);
    },
  };
}

function times(target, quantiles) {
  target.set(measured(quantiles?.p50), quantiles ? `p95 ${measured(quantiles.p95).join("\u202f")}` : "not measured yet");
}

function figure(name, explained) {
  const value = h("span", { class: "value" });
  const unit = h("span", { class: "unit" });
  const aside = h("span", { class: "aside" });
  return {
    node: h("div", { title: explained }, h("dt", {}, name), h("dd", {}, value, unit, aside)),
    set([digits, of], more = "") {
      setText(value, digits);
      setText(unit, of);
      setText(aside, more);
    },
  };
}
