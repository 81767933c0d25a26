/** The live chart of chains: hosts as bars over their blocks, and dots for the tokens that move along the edges. */

import { h, keyed, s, setAttribute, setText } from "../dom.js";
import { count, number, plural, span } from "../format.js";
import { runs } from "../words.js";
import { MOST_BARS, along, arranged, motion, scale, way } from "./chain_layout.js";

const LANE = 38;
const BAR = 30;
const TOP = 8;
const RAIL = 7; // pixels from the middle of a bar down to its tokens, so that they do not cover the label
const FRAME_MS = 33;
const LETTER = 6.6; // average width of a letter in pixels

/** `update(model, hosts, flows)` draws; hosts are peers with `id` and `label`. `highlight(block | null)` marks hosts. */
export function chains() {
  const still = matchMedia("(prefers-reduced-motion: reduce)");
  let playing = !still.matches;
  let shown = true; // whether the browser reports it on the screen
  let picture = { bars: [], lanes: 0, edges: [] };
  let model = null;
  let known = { hosts: [], flows: [] };
  let width = 0;
  let block = null;
  let ways = [];
  let ran = new Map(); // pixels that the dots of each edge have moved, kept so that a new speed causes no jump
  let last_ms = 0;
  let frame = 0;

  const edges = s("g", { class: "edges" });
  const gaps = s("g");
  const bars = s("g");
  const cursor = s("line", { class: "chain-cursor" });
  const ends = [0, 1].map(() => s("g", { class: "chain-client" }, s("rect", { rx: 6 }), s("text", {}, "clients")));
  const svg = s("svg", { role: "img" }, gaps, edges, bars, ends, cursor);
  const canvas = h("canvas", { "aria-hidden": "true" });
  const box = h("div", { class: "chains" }, svg, canvas);
  const nothing = h("p", { class: "quiet chains-note" });
  const button = h("button", { type: "button", class: "quiet-button", onclick: () => { playing = !playing; labelButton(); run(); } });

  function labelButton() {
    setText(button, playing ? "‖ Pause" : "▶ Play");
    setAttribute(button, "aria-label", playing ? "Pause the moving tokens" : "Play the moving tokens");
  }

  function draw() {
    if (!model || !width) return;
    const { x, margin, narrow } = scale(width, model.blocks);
    picture = arranged(known.hosts, known.flows, model.blocks, narrow ? MOST_BARS / 2 : MOST_BARS);
    const high = TOP * 2 + Math.max(1, picture.lanes) * LANE;
    const inset = Math.min(9, width / 100);
    const middle = (bar) => TOP + bar.lane * LANE + LANE / 2;
    const rail = (bar) => middle(bar) + RAIL;
    const left = (bar) => x(bar.start) + inset;
    const right = (bar) => x(bar.end) - inset;
    setAttribute(svg, "viewBox", `0 0 ${width} ${high}`);
    setAttribute(svg, "width", width);
    setAttribute(svg, "height", high);
    setAttribute(svg, "aria-label", summary());

    keyed(gaps, runs(model.replicas, (n) => n === 0), (gap) => gap.join(), () => s("g", { class: "chain-gap" }, s("rect", { y: 0, rx: 4 }), s("text")), (node, [a, b]) => {
      const [rect, text] = node.children;
      setAttribute(rect, "x", x(a));
      setAttribute(rect, "width", x(b) - x(a));
      setAttribute(rect, "height", high);
      setAttribute(text, "x", (x(a) + x(b)) / 2);
      setAttribute(text, "y", high / 2);
      setText(text, fitting(`no host for ${span([a, b])}`, x(b) - x(a) - 8, "✕"));
    });

    ends.forEach((end, at) => {
      const wide = narrow ? 8 : 52;
      const rect = end.firstElementChild;
      setAttribute(end, "transform", `translate(${at ? width - margin + (margin - wide) : 0} ${high / 2})`);
      for (const [name, value] of Object.entries({ x: 0, y: -13, width: wide, height: 26 })) setAttribute(rect, name, value);
      setAttribute(end.lastElementChild, "x", wide / 2);
      setAttribute(end.lastElementChild, "visibility", narrow ? "hidden" : "visible");
    });
    const home = narrow ? 8 : 52;

    ways = picture.edges.map((edge) => {
      const from = edge.source ? [right(edge.source), rail(edge.source)] : [home, high / 2];
      if (!edge.target) return { edge, ...way(from, [width - home, high / 2], null) };
      const entry = Math.max(left(edge.target), Math.min(edge.source ? x(edge.source.end) + inset : 0, right(edge.target)));
      return { edge, ...way(from, [entry, rail(edge.target)], [right(edge.target), rail(edge.target)]) };
    });
    keyed(edges, ways, ({ edge }) => edge.id, () => s("path"), (node, { edge, curve }) => {
      setAttribute(node, "d", curve);
      setAttribute(node, "stroke-width", (1 + Math.min(5, Math.sqrt(edge.tokens_per_s) / 2)).toFixed(1));
      setAttribute(node, "class", edge.tokens_per_s > 0 ? "busy" : "idle");
    });
    keyed(bars, picture.bars, (bar) => bar.id, () => s("g", {}, s("rect", { rx: 5, height: BAR }), s("path"), s("text"), s("title")), (node, bar) => {
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
    ran = new Map(ways.map(({ edge }) => [edge.id, ran.get(edge.id) ?? 0]));
    canvas.width = width * devicePixelRatio;
    canvas.height = high * devicePixelRatio;
    canvas.style.setProperty("width", `${width}px`);
    canvas.style.setProperty("height", `${high}px`);
    setText(nothing, dotNote(picture));
    marked();
    paint();
    run();
  }

  function summary() {
    const at_work = picture.edges.filter((edge) => !edge.target && edge.tokens_per_s > 0);
    const speed = at_work.reduce((sum, edge) => sum + edge.tokens_per_s, 0);
    const hosts = picture.bars.reduce((sum, bar) => sum + bar.peers.length, 0);
    return `${plural(hosts, "host")} over ${count(model.blocks)} blocks; ${speed > 0 ? `${number(speed)} tokens per second are answered` : "no tokens are computed"}.`;
  }

  function marked() {
    const { x } = scale(width, model.blocks);
    setAttribute(cursor, "visibility", block === null ? "hidden" : "visible");
    const at = x((block ?? 0) + 0.5);
    for (const [name, value] of Object.entries({ x1: at, x2: at, y1: 0, y2: TOP * 2 + picture.lanes * LANE })) setAttribute(cursor, name, value);
    [...bars.children].forEach((node, i) => {
      const bar = picture.bars[i];
      node.classList.toggle("host-marked", block !== null && bar.start <= block && block < bar.end);
      node.classList.toggle("host-faded", block !== null && !(bar.start <= block && block < bar.end));
    });
  }

  function paint() {
    const brush = canvas.getContext("2d");
    const ratio = devicePixelRatio;
    brush.setTransform(ratio, 0, 0, ratio, 0, 0);
    brush.clearRect(0, 0, canvas.width, canvas.height);
    brush.fillStyle = getComputedStyle(box).getPropertyValue("--token");
    brush.beginPath();
    for (const { edge, points } of ways) {
      const moving = motion(edge.tokens_per_s);
      if (!moving) continue;
      const length = points.at(-1)[2];
      for (let at = ran.get(edge.id) % moving.gap; at < length; at += moving.gap) {
        const [x, y] = along(points, at);
        brush.moveTo(x + 2.4, y);
        brush.arc(x, y, 2.4, 0, Math.PI * 2);
      }
    }
    brush.fill();
  }

  function step(now_ms) {
    frame = 0;
    if (now_ms - last_ms >= FRAME_MS) {
      const passed_s = Math.min(0.1, (now_ms - last_ms) / 1000);
      last_ms = now_ms;
      for (const { edge } of ways) ran.set(edge.id, ran.get(edge.id) + (motion(edge.tokens_per_s)?.speed ?? 0) * passed_s);
      paint();
    }
    run();
  }

  function run() {
    const moves = playing && shown && !document.hidden && ways.some(({ edge }) => edge.tokens_per_s > 0);
    if (moves && !frame) frame = requestAnimationFrame(step);
    if (!moves && frame) {
      cancelAnimationFrame(frame);
      frame = 0;
    }
  }

  still.addEventListener("change", () => { playing = !still.matches; labelButton(); run(); });
  document.addEventListener("visibilitychange", run);
  document.addEventListener("themechange", () => paint());
  new IntersectionObserver(([entry]) => { shown = entry.isIntersecting; run(); }).observe(box);
  new ResizeObserver(([entry]) => { width = Math.floor(entry.contentRect.width); draw(); }).observe(box);
  labelButton();

  return {
    node: h("div", {}, box, nothing),
    button,
    highlight(next) { block = next; if (model && width) marked(); },
    update(next, hosts, flows) {
      model = next;
      known = { hosts, flows };
      draw();
    },
  };
}

function dotNote({ bars, edges }) {
  if (!bars.length) return "";
  if (!edges.some((edge) => edge.tokens_per_s > 0)) return "No answers are being computed right now.";
  const many = edges.some((edge) => edge.tokens_per_s > 6);
  const hosts = bars.some((bar) => bar.peers.length > 1) ? "Hosts with similar spans share a bar. " : "";
  return `${hosts}${many ? "Dots are tokens; on busy links one dot stands for several." : "Each dot is a token."}`;
}

/** The text if it fits into `pixels`, else the short form or, without one, the beginning. */
function fitting(text, pixels, short = null) {
  const letters = Math.floor(pixels / LETTER);
  if (text.length <= letters) return text;
  if (short !== null) return short.length <= letters + 1 ? short : "";
  return letters < 4 ? "" : `${text.slice(0, letters - 1)}…`;
}
