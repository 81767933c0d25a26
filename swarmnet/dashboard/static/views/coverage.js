/** The bar of a model's blocks: the replicas of each block, with a mark at the weakest and a cursor for details. */

import { h, s, setAttribute, setText } from "../dom.js";
import { count, plural } from "../format.js";
import { runs } from "../words.js";
import { scale } from "./chain_layout.js";

const HEIGHT = 64;
const LABEL = 16; // height of the numbers above the columns, in pixels
const AXIS = 27; // height of the mark and the block numbers below the columns
const SHOWN_NAMES = 5;

const level = (replicas) => Math.min(3, replicas);

/**
 * Calls `onBlock(block | null)` when the cursor moves and `onChosen(block)` on Enter or a click.
 * `update(model, hosts, name)` draws; hosts are peers with `id`, `label` and `blocks`.
 */
export function coverage({ onBlock, onChosen }) {
  let model = null;
  let hosts = [];
  let at = 0; // the block under the cursor
  let hasCursor = false;
  let width = 0;
  const columns = s("g");
  const numbers = s("g", { class: "coverage-numbers" });
  const axis = s("g", { class: "coverage-axis" });
  const mark = s("path", { class: "coverage-weakest", d: "M0 0l5 8h-10z" });
  const cursor = s("rect", { class: "coverage-cursor", y: LABEL - 3, height: HEIGHT + 6, rx: 2, width: 0 });
  const svg = s("svg", { "aria-hidden": "true", height: LABEL + HEIGHT + AXIS }, patterns(), columns, numbers, axis, mark, cursor);
  const bar = h("div", { class: "coverage", role: "slider", tabindex: 0, "aria-valuemin": 0 }, svg);
  const detail = h("p", { class: "coverage-detail" });

  function draw() {
    if (!model || !width) return;
    const { x } = scale(width, model.blocks);
    const most = Math.max(4, ...model.replicas);
    const one = x(1) - x(0);
    const gap = one > 9 ? 2 : one > 4 ? 1 : 0.4;
    setAttribute(svg, "width", width);
    setAttribute(svg, "viewBox", `0 0 ${width} ${LABEL + HEIGHT + AXIS}`);
    columns.replaceChildren(...model.replicas.map((replicas, block) => {
      const tall = replicas ? Math.max(7, (HEIGHT * replicas) / most) : HEIGHT;
      return s("rect", {
        class: `replicas-${level(replicas)}`, x: x(block) + gap / 2, y: LABEL + HEIGHT - tall,
        width: Math.max(0.8, one - gap), height: tall, rx: Math.min(2, one / 4),
      });
    }));
    const ranges = [...new Set(model.replicas)].flatMap((n) => runs(model.replicas, (other) => other === n).map((run) => [n, run]));
    numbers.replaceChildren(...ranges.filter(([n, [a, b]]) => x(b) - x(a) > 5 + 6.5 * String(n).length).map(([n, [a, b]]) =>
      s("text", { x: (x(a) + x(b)) / 2, y: LABEL + HEIGHT - (n ? Math.max(7, (HEIGHT * n) / most) : HEIGHT) - 4 }, String(n))));
    axis.replaceChildren(...ticks(model.blocks, width).map((block) => s("text", { x: x(block + 0.5), y: LABEL + HEIGHT + 22 }, String(block))));
    const weak = model.weakest && new Set(model.replicas).size > 1;
    setAttribute(mark, "visibility", weak ? "visible" : "hidden");
    if (weak) setAttribute(mark, "transform", `translate(${x(model.weakest.block + 0.5)} ${LABEL + HEIGHT + 3})`);
    drawCursor();
  }

  function drawCursor() {
    const { x } = scale(width, model.blocks);
    at = Math.min(at, model.blocks - 1);
    setAttribute(cursor, "visibility", hasCursor ? "visible" : "hidden");
    setAttribute(cursor, "x", x(at) - 1);
    setAttribute(cursor, "width", Math.max(3, x(at + 1) - x(at) + 2));
    const shown = hasCursor || !model.weakest ? at : model.weakest.block;
    const there = hosts.filter((peer) => peer.blocks[0] <= shown && shown < peer.blocks[1]);
    const names = there.slice(0, SHOWN_NAMES).map((peer) => peer.label).join(", ") + (there.length > SHOWN_NAMES ? ` and ${count(there.length - SHOWN_NAMES)} more` : "");
    const replicas = model.replicas[shown];
    const text = `${hasCursor ? "Block" : "Weakest: block"} ${shown} · ${replicas ? plural(replicas, "host") : "no host"}${names ? ` · ${names}` : ""}`;
    setText(detail, text);
    setAttribute(bar, "aria-valuenow", shown);
    setAttribute(bar, "aria-valuetext", text);
  }

  function moveCursor(block) {
    hasCursor = block !== null;
    if (hasCursor) at = Math.max(0, Math.min(model.blocks - 1, block));
    drawCursor();
    onBlock(hasCursor ? at : null);
  }

  bar.addEventListener("pointermove", (event) => moveCursor(Math.floor(scale(width, model.blocks).block(event.clientX - bar.getBoundingClientRect().left))));
  bar.addEventListener("pointerleave", () => { if (document.activeElement !== bar) look(null); });
  bar.addEventListener("focus", () => moveCursor(hasCursor ? at : (model.weakest?.block ?? 0)));
  bar.addEventListener("blur", () => moveCursor(null));
  bar.addEventListener("click", () => { if (hasCursor) onChosen(at); });
  bar.addEventListener("keydown", (event) => {
    const to = { ArrowRight: at + 1, ArrowUp: at + 1, ArrowLeft: at - 1, ArrowDown: at - 1, PageUp: at + 10, PageDown: at - 10, Home: 0, End: model.blocks - 1 }[event.key];
    if (event.key === "Enter") onChosen(at);
    else if (to === undefined) return;
    else moveCursor(to);
    event.preventDefault();
  });
  new ResizeObserver(([entry]) => { width = Math.floor(entry.contentRect.width); draw(); }).observe(bar);

  return {
    node: h("div", { class: "coverage-box" }, bar, h("div", { class: "coverage-foot" }, detail, legend())),
    update(next, peers, name) {
      const same = model && model.replicas.join() === next.replicas.join() && model.weakest?.block === next.weakest?.block;
      model = next;
      hosts = peers;
      setAttribute(bar, "aria-label", `Hosts of each block of ${name}`);
      setAttribute(bar, "aria-valuemax", model.blocks - 1);
      if (same && width) drawCursor();
      else draw();
    },
  };
}

/** Block numbers for the axis, in round steps that leave 64 pixels to each number. */
function ticks(blocks, width) {
  const room = Math.max(2, Math.floor(width / 64));
  const step = [1, 2, 5, 10, 20, 25, 50, 100, 200, 500].find((each) => blocks / each <= room) ?? 1000;
  return Array.from({ length: Math.ceil(blocks / step) }, (_, i) => i * step);
}

function patterns() {
  return s("defs", {},
    s("pattern", { id: "stripes", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
      s("rect", { width: 6, height: 6, class: "stripes-under" }), s("rect", { width: 2.4, height: 6, class: "stripes-over" })),
    s("pattern", { id: "crosses", width: 7, height: 7, patternUnits: "userSpaceOnUse" },
      s("rect", { width: 7, height: 7, class: "crosses-under" }), s("path", { d: "M1 1l5 5M6 1l-5 5", class: "crosses-over" })));
}

function legend() {
  const item = (n, text) => h("li", {}, s("svg", { width: 12, height: 12, "aria-hidden": "true" }, s("rect", { class: `replicas-${n}`, x: 0.5, y: 0.5, width: 11, height: 11, rx: 2 })), text);
  return h("ul", { class: "legend", "aria-label": "Hosts of a block" }, h("li", {}, "Hosts of a block:"), item(0, "none"), item(1, "1"), item(2, "2"), item(3, "3 or more"));
}
