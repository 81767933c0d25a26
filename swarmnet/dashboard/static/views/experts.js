/** The map of a model's routed experts: a column for each block, a row for each expert, with its replicas or its load. */

import { h, segmented, setAttribute, setStyle, setText } from "../dom.js";
import { count, plural } from "../format.js";
import { scale } from "./chain_layout.js";

const TALLEST = 224; // pixels of a map, unless it has more experts than pixels
const MAX_CELL = 14; // pixels of a row
const MARKED = 6; // pixels of a row from which on missing experts have a cross
const MISSING = "x";
const LOADS = ["no rows yet", "less than half the mean of its block", "less than the mean of its block", "more than the mean of its block", "twice the mean of its block, or more"];
const SINGLE_OPACITY = 0.5; // so that missing experts, which are red, stand out
const LOAD_OPACITY = [0, 0.2, 0.42, 0.7, 1];

/** Calls `onChosen(block)` on Enter or a click. `update(model, name)` draws; the node is hidden for a model without experts on peers. */
export function expertMap({ onChosen }) {
  let model = null;
  let map = null;
  let drawn = ""; // what the canvas shows
  let width = 0;
  let at = [0, 0]; // block and expert under the cursor
  let hasCursor = false;
  let shows = "replicas";

  const canvas = h("canvas", { "aria-hidden": "true" });
  const cursor = h("div", { class: "experts-cursor", "aria-hidden": "true", hidden: true });
  const box = h("div", { class: "experts-map", role: "slider", tabindex: 0, "aria-valuemin": 0 }, canvas, cursor);
  const detail = h("p", { class: "coverage-detail" });
  const keys = { replicas: legend([["0", "none"], [MISSING, "missing"], ["1", "1"], ["2", "2"], ["3", "3 or more"]]), load: legend([["low", "few rows"], ["high", "many rows"], [MISSING, "missing"]]) };
  const choice = segmented("Show on the map", [["replicas", "Replicas"], ["load", "Load"]], shows, (next) => { shows = next; draw(); });
  const head = h("div", { class: "experts-head" }, h("h3", {}, "Experts"), h("span", { class: "quiet" }), choice);
  const node = h("div", { class: "experts", hidden: true }, head, box, h("div", { class: "coverage-foot" }, detail, keys.replicas, keys.load));

  const blocks = () => Object.keys(map.replicas).map(Number);
  const rowHeight = () => Math.max(1, Math.min(MAX_CELL, Math.floor(TALLEST / map.experts)));

  function draw() {
    if (!map || !width) return;
    const wanted = JSON.stringify([width, devicePixelRatio, shows, model.blocks, document.documentElement.dataset.theme, map.replicas, shows === "load" && map.load]);
    if (wanted !== drawn) {
      drawn = wanted;
      paint();
    }
    keys.replicas.hidden = shows !== "replicas";
    keys.load.hidden = shows !== "load";
    drawCursor();
  }

  function paint() {
    const { x } = scale(width, model.blocks);
    const row = rowHeight();
    const high = row * map.experts;
    const ratio = devicePixelRatio;
    canvas.width = width * ratio;
    canvas.height = high * ratio;
    setStyle(canvas, "width", `${width}px`);
    setStyle(canvas, "height", `${high}px`);
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    const style = getComputedStyle(node);
    const [none, single, two, more, bad, empty] = ["--line", "--r1", "--r2", "--r3", "--r0", "--sunken"].map((name) => style.getPropertyValue(name).trim());
    const one = x(1) - x(0);
    const gap = one > 9 ? 2 : one > 4 ? 1 : 0;
    const line = row > 3 ? 1 : 0;
    for (const [block, text] of Object.entries(map.replicas)) {
      const left = x(Number(block)) + gap / 2;
      const load = map.load?.[block] ?? "";
      context.fillStyle = empty;
      context.fillRect(left, 0, one - gap, row * text.length);
      for (let expert = 0; expert < text.length; expert += 1) {
        const sign = text[expert];
        const missing = sign === MISSING;
        if (shows === "load" && !missing) {
          context.globalAlpha = LOAD_OPACITY[Number(load[expert] ?? 0)];
          context.fillStyle = more;
        } else {
          context.fillStyle = missing ? bad : [none, single, two, more][Math.min(3, Number(sign))];
          if (sign === "1") context.globalAlpha = SINGLE_OPACITY;
        }
        context.fillRect(left, expert * row, one - gap, row - line);
        context.globalAlpha = 1;
        if (missing && row >= MARKED && one >= MARKED) cross(context, left + (one - gap) / 2, expert * row + (row - line) / 2, Math.min(row, one) / 2 - 1.5, empty);
      }
    }
  }

  function drawCursor() {
    const { x } = scale(width, model.blocks);
    const row = rowHeight();
    const known = blocks();
    if (!known.includes(at[0])) at = [known[0], 0];
    at[1] = Math.min(at[1], map.replicas[at[0]].length - 1);
    const [block, expert] = at;
    cursor.hidden = !hasCursor;
    setStyle(cursor, "left", `${x(block) - 1}px`);
    setStyle(cursor, "width", `${Math.max(3, x(block + 1) - x(block))}px`);
    setStyle(cursor, "top", `${expert * row - 1}px`);
    setStyle(cursor, "height", `${Math.max(3, row + 1)}px`);
    const text = hasCursor ? cellText(block, expert) : summary();
    setText(detail, text);
    setAttribute(box, "aria-valuenow", block * map.experts + expert);
    setAttribute(box, "aria-valuetext", text);
  }

  function cellText(block, expert) {
    const sign = map.replicas[block][expert];
    const peers = sign === MISSING ? "missing: hosts wait for a peer with it" : sign === "0" ? "no peer computes it for others" : `${sign === "9" ? "9 or more" : sign} ${sign === "1" ? "replica" : "replicas"}`;
    const load = map.load?.[block]?.[expert];
    return `Block ${block}, expert ${expert} · ${peers}${load === undefined ? "" : ` · load: ${LOADS[load]}`}`;
  }

  function summary() {
    if (map.missing) return `${plural(map.missing, "expert")} missing, as blocks:experts: ${map.missing_text}`;
    return map.single ? `No expert is missing; ${count(map.single)} have one replica.` : "No expert is missing.";
  }

  function moveCursor(block, expert) {
    hasCursor = block !== null;
    const known = blocks();
    if (hasCursor) at = [known.reduce((best, each) => (Math.abs(each - block) < Math.abs(best - block) ? each : best)), Math.max(0, expert)];
    drawCursor();
  }

  box.addEventListener("pointermove", (event) => {
    const bounds = box.getBoundingClientRect();
    moveCursor(Math.floor(scale(width, model.blocks).block(event.clientX - bounds.left)), Math.floor((event.clientY - bounds.top) / rowHeight()));
  });
  box.addEventListener("pointerleave", () => { if (document.activeElement !== box) moveCursor(null, 0); });
  box.addEventListener("focus", () => moveCursor(...at));
  box.addEventListener("blur", () => moveCursor(null, 0));
  box.addEventListener("click", () => { if (hasCursor) onChosen(at[0]); });
  box.addEventListener("keydown", (event) => {
    const known = blocks();
    const column = known.indexOf(at[0]);
    const to = {
      ArrowRight: [known[column + 1] ?? at[0], at[1]], ArrowLeft: [known[column - 1] ?? at[0], at[1]], ArrowDown: [at[0], at[1] + 1], ArrowUp: [at[0], at[1] - 1],
      PageDown: [at[0], at[1] + 16], PageUp: [at[0], at[1] - 16], Home: [known[0], at[1]], End: [known.at(-1), at[1]],
    }[event.key];
    if (event.key === "Enter") onChosen(at[0]);
    else if (!to) return;
    else moveCursor(...to);
    event.preventDefault();
  });
  new ResizeObserver(([entry]) => { width = Math.floor(entry.contentRect.width); draw(); }).observe(box);
  document.addEventListener("themechange", draw);

  return {
    node,
    update(next, name) {
      model = next;
      map = next.experts ?? null;
      node.hidden = !map;
      if (!map) return;
      choice.hidden = !Object.keys(map.load ?? {}).length;
      setText(head.children[1], `${count(map.experts)} in each of ${plural(blocks().length, "block")}, computed by ${plural(map.peers, "peer")}`);
      setAttribute(box, "aria-label", `Replicas of each expert of ${name}, by block`);
      setAttribute(box, "aria-valuemax", model.blocks * map.experts - 1);
      draw();
    },
  };
}

function cross(context, x, y, half, colour) {
  context.strokeStyle = colour;
  context.lineWidth = 1.5;
  context.beginPath();
  context.moveTo(x - half, y - half);
  context.lineTo(x + half, y + half);
  context.moveTo(x + half, y - half);
  context.lineTo(x - half, y + half);
  context.stroke();
}

const legend = (items) => h("ul", { class: "legend", "aria-label": "Colours of the map" }, items.map(([sign, text]) => h("li", {}, h("i", { class: `expert-key expert-${sign}`, "aria-hidden": "true" }), text)));
