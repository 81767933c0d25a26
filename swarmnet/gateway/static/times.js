/** Draws the times of an answer: a column for each trip around the chain, and the parts of the chosen one. */

import { h, s, setAttribute, setStyle, setText } from "./dom.js";
import { plural, seconds, shortId, span } from "./format.js";
import { visible } from "./markdown.js";

const MAX_COLUMNS = 200; // the newest trips; more would be narrower than a pixel on a telephone
const HEIGHT = 72;
const PARTS = [
  ["compute", "computing"],
  ["wire", "on the wire"],
  ["wait", "waiting at hosts"],
  ["send", "encoding and sending"],
  ["here", "at this endpoint"],
];

/** The node for the steps of `message`. `node.update()` draws new ones. */
export function timesNode(message) {
  const chart = s("svg", { class: "trips", role: "slider", tabindex: "0", "aria-label": "Trips of the answer", preserveAspectRatio: "none" });
  const title = h("p", { class: "trip-title" });
  const bar = h("div", { class: "trip-bar", "aria-hidden": "true" });
  const rows = h("tbody", {});
  const table = h("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Times of each host" }, h("table", {},
    h("thead", {}, h("tr", {}, ["Host", "Wire to it", "Wait", "Compute", "Send"].map((name) => h("th", { scope: "col" }, name)))), rows));
  const legend = h("ul", { class: "legend" }, PARTS.map(([kind, name]) => h("li", {}, h("i", { class: `part part-${kind}` }), name)));
  const node = h("div", { class: "times" }, chart, legend, title, bar, table);
  let steps = [];
  let at = 0;

  node.update = () => {
    steps = message.steps.slice(-MAX_COLUMNS);
    const longest = steps.reduce((found, step, index) => (index > 0 && step.took_s > steps[found].took_s ? index : found), Math.min(1, steps.length - 1));
    at = Math.min(longest, steps.length - 1);
    drawColumns();
    choose(at);
  };

  function drawColumns() {
    chart.setAttribute("viewBox", `0 0 ${steps.length} ${HEIGHT}`);
    const sorted = steps.map((step) => step.took_s).sort((a, b) => a - b);
    const most = Math.max(sorted[Math.floor(sorted.length * 0.98)] ?? 0, 1e-6); // a single long trip, such as the prompt's, is cut off
    chart.replaceChildren(...steps.map((step, index) => {
      const column = s("g", {});
      let y = HEIGHT;
      const found = sums(step);
      for (const [kind] of PARTS) {
        const height = Math.min(y, Math.max(0, found[kind] / most * HEIGHT));
        y -= height;
        if (height > 0.2) column.append(s("rect", { class: `part-${kind}`, x: index + 0.08, y, width: 0.84, height }));
      }
      return column;
    }));
    setAttribute(chart, "aria-valuemin", 1);
    setAttribute(chart, "aria-valuemax", steps.length);
  }

  function choose(index) {
    at = Math.max(0, Math.min(steps.length - 1, index));
    [...chart.children].forEach((column, each) => column.classList.toggle("chosen", each === at));
    const step = steps[at];
    const text = step.text ? `“${visible(step.text)}”, ` : "";
    setText(title, `${text}${plural(step.tokens, "token")} in ${inWords(step.took_s)}${step.positions > step.tokens ? `, ${plural(step.positions, "position")} computed` : ""}`);
    setAttribute(chart, "aria-valuenow", at + 1);
    setAttribute(chart, "aria-valuetext", `Trip ${at + 1}: ${title.textContent}`);
    const found = sums(step);
    bar.replaceChildren(...PARTS.filter(([kind]) => found[kind] > 0).map(([kind]) => {
      const part = h("i", { class: `part-${kind}` });
      setStyle(part, "flex-grow", String(found[kind] * 1000));
      return part;
    }));
    rows.replaceChildren(
      h("tr", {}, h("th", { scope: "row" }, "this endpoint"), h("td", {}, ""), h("td", {}, ""), h("td", {}, ""), h("td", {}, inWords(step.here_s))),
      ...step.hops.map((hop) => h("tr", {}, h("th", { scope: "row" }, h("b", {}, span([hop.start, hop.end])), ` ${shortId(hop.peer)}`), [hop.wire_s, hop.wait_s, hop.compute_s, hop.send_s].map((value) => h("td", {}, inWords(value))))),
      h("tr", {}, h("th", { scope: "row" }, "back here"), h("td", {}, inWords(step.back_s)), h("td", {}, ""), h("td", {}, ""), h("td", {}, "")));
  }

  chart.addEventListener("keydown", (event) => {
    const to = { ArrowLeft: at - 1, ArrowDown: at - 1, ArrowRight: at + 1, ArrowUp: at + 1, Home: 0, End: steps.length - 1, PageUp: at - 10, PageDown: at + 10 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    choose(to);
  });
  const point = (event) => {
    const box = chart.getBoundingClientRect();
    choose(Math.floor((event.clientX - box.left) / box.width * steps.length));
  };
  chart.addEventListener("pointerdown", point);
  chart.addEventListener("pointermove", (event) => { if (event.buttons || event.pointerType === "mouse") point(event); });
  node.update();
  return node;
}

/** Sums up the parts of a step, in seconds: {here, wire, wait, compute, send}. */
function sums(step) {
  const total = { here: step.here_s, wire: step.back_s, wait: 0, compute: 0, send: 0 };
  for (const { wire_s, wait_s, compute_s, send_s } of step.hops) {
    total.wire += wire_s;
    total.wait += wait_s;
    total.compute += compute_s;
    total.send += send_s;
  }
  return total;
}

const inWords = (value) => seconds(Math.max(0, value));
