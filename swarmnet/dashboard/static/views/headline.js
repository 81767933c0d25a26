/** The health of a model in a sentence, and its main figures. */

import { h, setAttribute, setText } from "../dom.js";
import { count, durationParts, number } from "../format.js";
import { health } from "../words.js";

/** `update(model)` fills it with the JSON of a model. */
export function headline() {
  const symbol = h("span", { class: "health-symbol", "aria-hidden": "true" });
  const title = h("h1", {});
  const text = h("p", { class: "health-text" });
  const state = h("div", { class: "health" }, symbol, h("div", {}, title, text));
  const speed = figure("Speed", "Tokens per second that the last hosts of all chains answer, from the reports of the hosts");
  const peers = figure("Peers", "Peers that host blocks or experts of this model");
  const sessions = figure("Sessions", "Open sessions of clients, and the most in the last 24 hours");
  const first = figure("First token", "Time from the prompt to the first token: the median (p50) and the 95th percentile (p95) of the last minutes");
  const each = figure("Each token", "Time from one token to the next: the median (p50) and the 95th percentile (p95) of the last minutes");
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
  target.set(durationParts(quantiles?.p50), quantiles ? `p95 ${durationParts(quantiles.p95).join("\u202f")}` : "not measured yet");
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
