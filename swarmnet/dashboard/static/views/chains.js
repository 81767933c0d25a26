/** The live chart of chains: hosts as bars over their blocks, and dots for the positions that move along the edges. */

import { h, reconcile, s, setAttribute, setText } from "../dom.js";
import { count, number, plural, span } from "../format.js";
import { runs } from "../words.js";
import { MAX_BARS, dotMotion, edgePath, layout, pointAt, scale } from "./chain_layout.js";

const ROW = 38;
const BAR = 30;
const TOP = 8;
const RAIL = 7; // pixels from the middle of a bar down to its dots, so that they do not cover the label
const FRAME_MS = 33;
const LETTER = 6.6; // average width of a letter in pixels

/** `update(model, hosts, flows)` draws; hosts are peers with `id` and `label`. `highlight(block | null)` marks hosts. */
export function chains() {
  const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");
  let playing = !reducedMotion.matches;
  let shown = true; // whether the browser reports it on the screen
  let picture = { bars: [], rows: 0, edges: [] };
  let model = null;
  let data = { hosts: [], flows: [] };
  let width = 0;
  let block = null;
  let paths = [];
  let offsets = new Map(); // pixels that the dots of each edge have moved, kept so that a new speed causes no jump
  let last_ms = 0;
  let frame = 0;

  const edges = s("g", { class: "edges" });
  const gaps = s("g");
  const bars = s("g");
  const cursor = s("line", { class: "chain-cursor" });
  const clients = [0, 1].map(() => s("g", { class: "chain-client" }, s("rect", { rx: 6 }), s("text", {}, "clients")));
  const svg = s("svg", { role: "img" }, gaps, edges, bars, clients, cursor);
  const canvas = h("canvas", { "aria-hidden": "true" });
  const box = h("div", { class: "chains" }, svg, canvas);
  const note = h("p", { class: "quiet chains-note" });
  const button = h("button", { type: "button", class: "quiet-button", onclick: () => { playing = !playing; labelButton(); run(); } });

  function labelButton() {
    setText(button, playing ? "‖ Pause" : "▶ Play");
    setAttribute(button, "aria-label", playing ? "Pause the moving dots" : "Play the moving dots");
  }

  function draw() {
    if (!model || !width) return;
    const { x, margin, narrow } = scale(width, model.blocks);
    picture = layout(data.hosts, data.flows, model.blocks, narrow ? MAX_BARS / 2 : MAX_BARS);
    const high = TOP * 2 + Math.max(1, picture.rows) * ROW;
    const inset = Math.min(9, width / 100);
    const middle = (bar) => TOP + bar.row * ROW + ROW / 2;
    const rail = (bar) => middle(bar) + RAIL;
    const left = (bar) => x(bar.start) + inset;
    const right = (bar) => x(bar.end) - inset;
    setAttribute(svg, "viewBox", `0 0 ${width} ${high}`);
    setAttribute(svg, "width", width);
    setAttribute(svg, "height", high);
    setAttribute(svg, "aria-label", summary());

    reconcile(gaps, runs(model.replicas, (n) => n === 0), (gap) => gap.join(), () => s("g", { class: "chain-gap" }, s("rect", { y: 0, rx: 4 }), s("text")), (node, [a, b]) => {
      const [rect, text] = node.children;
      setAttribute(rect, "x", x(a));
      setAttribute(rect, "width", x(b) - x(a));
      setAttribute(rect, "height", high);
      setAttribute(text, "x", (x(a) + x(b)) / 2);
      setAttribute(text, "y", high / 2);
      setText(text, fitting(model.experts?.missing ? "hosts wait for experts" : `no host for ${span([a, b])}`, x(b) - x(a) - 8, "✕"));
    });

    clients.forEach((end, at) => {
      const wide = narrow ? 8 : 52;
      const rect = end.firstElementChild;
      setAttribute(end, "transform", `translate(${at ? width - margin + (margin - wide) : 0} ${high / 2})`);
      for (const [name, value] of Object.entries({ x: 0, y: -13, width: wide, height: 26 })) setAttribute(rect, name, value);
      setAttribute(end.lastElementChild, "x", wide / 2);
      setAttribute(end.lastElementChild, "visibility", narrow ? "hidden" : "visible");
    });
    const home = narrow ? 8 : 52;

    paths = picture.edges.map((edge) => {
      const from = edge.source ? [right(edge.source), rail(edge.source)] : [home, high / 2];
      if (!edge.target) return { edge, ...edgePath(from, [width - home, high / 2], null) };
      const entry = Math.max(left(edge.target), Math.min(edge.source ? x(edge.source.end) + inset : 0, right(edge.target)));
      return { edge, ...edgePath(from, [entry, rail(edge.target)], [right(edge.target), rail(edge.target)]) };
    });
    reconcile(edges, paths, ({ edge }) => edge.id, () => s("path"), (node, { edge, curve }) => {
      setAttribute(node, "d", curve);
      setAttribute(node, "stroke-width", (1 + Math.min(5, Math.sqrt(edge.positions_per_s) / 2)).toFixed(1));
      setAttribute(node, "class", edge.positions_per_s > 0 ? "busy" : "idle");
    });
    reconcile(bars, picture.bars, (bar) => bar.id, () => s("g", {}, s("rect", { rx: 5, height: BAR }), s("path"), s("text"), s("title")), (node, bar) => {
      const wide = Math.max(3, right(bar) - left(bar));
      const [rect, line, text, title] = node.children;
      const alone = bar.peers.length === 1 ? bar.peers[0] : null;
      setAttribute(node, "transform", `translate(${left(bar).toFixed(1)} ${middle(bar) - BAR / 2})`);
      setAttribute(node, "class", `host ${alone && (alone.silent || alone.state !== "online") ? "host-quiet" : ""}`);
      setAttribute(rect, "width", wide.toFixed(1));
      setAttribute(line, "d", `M0 ${BAR / 2 + RAIL}h${wide.toFixed(1)}`);
      setAttribute(text, "x", 8);
      setAttribute(text, "y", BAR / 2);
      setText(text, alone ? fitting(alone.label, wide - 14) : fitting(plural(bar.peers.length, "host"), wide - 14, count(bar.peers.length)));
      const blocks = span([Math.round(bar.start), Math.round(bar.end)]);
      setText(title, `${alone ? alone.label : plural(bar.peers.length, "host")}: blocks ${alone ? "" : "about "}${blocks}`);
      node.onclick = alone ? () => { location.href = `/peers/${encodeURIComponent(alone.id)}`; } : null;
    });
    offsets = new Map(paths.map(({ edge }) => [edge.id, offsets.get(edge.id) ?? 0]));
    canvas.width = width * devicePixelRatio;
    canvas.height = high * devicePixelRatio;
    canvas.style.setProperty("width", `${width}px`);
    canvas.style.setProperty("height", `${high}px`);
    setText(note, dotNote(picture));
    markHosts();
    paint();
    run();
  }

  function summary() {
    const hosts = picture.bars.reduce((sum, bar) => sum + bar.peers.length, 0);
    return `${plural(hosts, "host")} over ${count(model.blocks)} blocks; ${model.tokens_per_s > 0 ? `clients receive ${number(model.tokens_per_s)} tokens per second` : "no client receives tokens"}.`;
  }

  function markHosts() {
    const { x } = scale(width, model.blocks);
    setAttribute(cursor, "visibility", block === null ? "hidden" : "visible");
    const at = x((block ?? 0) + 0.5);
    for (const [name, value] of Object.entries({ x1: at, x2: at, y1: 0, y2: TOP * 2 + picture.rows * ROW })) setAttribute(cursor, name, value);
    [...bars.children].forEach((node, i) => {
      const bar = picture.bars[i];
      node.classList.toggle("host-marked", block !== null && bar.start <= block && block < bar.end);
      node.classList.toggle("host-faded", block !== null && !(bar.start <= block && block < bar.end));
    });
  }

  function paint() {
    const context = canvas.getContext("2d");
    const ratio = devicePixelRatio;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, canvas.width, canvas.height);
    context.fillStyle = getComputedStyle(box).getPropertyValue("--token");
    context.beginPath();
    for (const { edge, points } of paths) {
      const moving = dotMotion(edge.positions_per_s);
      if (!moving) continue;
      const length = points.at(-1)[2];
      for (let at = offsets.get(edge.id) % moving.gap; at < length; at += moving.gap) {
        const [x, y] = pointAt(points, at);
        context.moveTo(x + 2.4, y);
        context.arc(x, y, 2.4, 0, Math.PI * 2);
      }
    }
    context.fill();
  }

  function step(now_ms) {
    frame = 0;
    if (now_ms - last_ms >= FRAME_MS) {
      const passed_s = Math.min(0.1, (now_ms - last_ms) / 1000);
      last_ms = now_ms;
      for (const { edge } of paths) offsets.set(edge.id, offsets.get(edge.id) + (dotMotion(edge.positions_per_s)?.speed ?? 0) * passed_s);
      paint();
    }
    run();
  }

  function run() {
    const moves = playing && shown && !document.hidden && paths.some(({ edge }) => edge.positions_per_s > 0);
    if (moves && !frame) frame = requestAnimationFrame(step);
    if (!moves && frame) {
      cancelAnimationFrame(frame);
      frame = 0;
    }
  }

  reducedMotion.addEventListener("change", () => { playing = !reducedMotion.matches; labelButton(); run(); });
  document.addEventListener("visibilitychange", run);
  document.addEventListener("themechange", () => paint());
  new IntersectionObserver(([entry]) => { shown = entry.isIntersecting; run(); }).observe(box);
  new ResizeObserver(([entry]) => { width = Math.floor(entry.contentRect.width); draw(); }).observe(box);
  labelButton();

  return {
    node: h("div", {}, box, note),
    button,
    highlight(next) { block = next; if (model && width) markHosts(); },
    update(next, hosts, flows) {
      model = next;
      data = { hosts, flows };
      draw();
    },
  };
}

function dotNote({ bars, edges }) {
  if (!bars.length) return "";
  if (!edges.some((edge) => edge.positions_per_s > 0)) return "No answers are being computed right now.";
  const many = edges.some((edge) => edge.positions_per_s > 6);
  const hosts = bars.some((bar) => bar.peers.length > 1) ? "Hosts with similar spans share a bar. " : "";
  return `${hosts}${many ? "Dots are positions: tokens of prompts and answers, and drafts. On busy links one dot stands for several." : "Each dot is a position: a token of a prompt or an answer, or a draft."}`;
}

/** The text if it fits into `pixels`, else the short form or, without one, the beginning. */
function fitting(text, pixels, short = null) {
  const letters = Math.floor(pixels / LETTER);
  if (text.length <= letters) return text;
  if (short !== null) return short.length <= letters + 1 ? short : "";
  return letters < 4 ? "" : `${text.slice(0, letters - 1)}…`;
}
