/** The table of peers: sorted, filtered, and virtualised: only the rows on the screen are in the document. */

import { h, reconcile, setAttribute, setStyle, setText } from "../dom.js";
import { bytes, count, dateTime, duration, number, percent, plural, seconds, shortId, span } from "../format.js";
import { EXPLANATIONS, peerState } from "../words.js";

const ROW = 37; // height of a row in pixels, as in parts.css; the rows on the screen follow from it
const SPARE = 6; // rows kept above and below those on the screen

const STATE_ORDER = ["lost", "left", "finished", "silent", "incompatible", "paused", "leaving", "joining", "online"];
const text = (a, b) => a.localeCompare(b);
const amount = (a, b) => (a === b ? 0 : (a ?? Infinity) - (b ?? Infinity)); // unknown values come last
const stateRank = (peer) => STATE_ORDER.indexOf(peer.state === "gone" ? peer.ending : peer.silent ? "silent" : peer.state);

const COLUMNS = [
  { id: "peer", title: "Peer", less: (a, b) => text(a.label, b.label) },
  { id: "state", title: "State", less: (a, b) => stateRank(a) - stateRank(b) },
  { id: "blocks", title: "Blocks", less: (a, b) => amount(a.blocks?.[0], b.blocks?.[0]) || amount(a.blocks?.[1], b.blocks?.[1]) },
  { id: "speed", title: "Positions/s", less: (a, b) => amount(a.positions_per_s, b.positions_per_s), most: true },
  { id: "delay", title: "Delay", less: (a, b) => amount(a.delay_s, b.delay_s) },
  { id: "queue", title: "Queue", less: (a, b) => amount(a.queue_s, b.queue_s), most: true },
  { id: "cache", title: "Free cache", less: (a, b) => amount(a.cache_bytes_free, b.cache_bytes_free) },
  { id: "route", title: "Link", less: (a, b) => text(a.connection, b.connection) },
  { id: "precision", title: "Precision", less: (a, b) => text(a.dtype ?? "", b.dtype ?? "") },
  { id: "version", title: "Version", less: (a, b) => text(a.version ?? "", b.version ?? "") },
  { id: "uptime", title: "Uptime", less: (a, b) => amount(a.up_s, b.up_s), most: true },
];

/** `update(peers, blocks, now_s)` fills it; peers have `id` and `label`. `chooseBlock(block)` shows only the hosts of a block. */
export function peerTable() {
  let all = [];
  let blocks = 1;
  let order = { column: COLUMNS[2], down: false };
  let word = "";
  let kind = "all";
  let block = null;
  let rows = [];
  let settled = []; // ids in the order shown, which stays while the pointer or the focus is in the table

  const before = h("tbody", { "aria-hidden": "true" }, h("tr", {}, h("td", { colspan: COLUMNS.length })));
  const body = h("tbody", {});
  const after = h("tbody", { "aria-hidden": "true" }, h("tr", {}, h("td", { colspan: COLUMNS.length })));
  const heads = COLUMNS.map((column) => h("th", { scope: "col", class: `c-${column.id}`, title: EXPLANATIONS[column.title] },
    h("button", { type: "button", onclick: () => sortBy(column) }, column.title, h("span", { class: "sort", "aria-hidden": "true" }))));
  const table = h("table", { class: "peers" }, h("caption", { class: "visually-hidden" }, "Peers of the swarm"), h("thead", {}, h("tr", {}, heads)), before, body, after);
  const scroll = h("div", { class: "table-scroll", tabindex: 0, role: "region", "aria-label": "Table of peers" }, table);
  const search = h("input", { type: "search", placeholder: "Name, id, version …", "aria-label": "Find peers", autocomplete: "off", spellcheck: "false" });
  const states = h("select", { "aria-label": "Filter by state" }, [["all", "All states"], ["online", "Online"], ["trouble", "Not serving"]].map(([value, name]) => h("option", { value }, name)));
  const chip = h("button", { type: "button", class: "chip chip-button", hidden: true, onclick: () => chooseBlock(null) });
  const total = h("span", { class: "quiet", role: "status" });
  const none = h("p", { class: "quiet", hidden: true }, "No peer matches.");

  function sortBy(column) {
    order = order.column === column ? { column, down: !order.down } : { column, down: Boolean(column.most) };
    refresh(true);
  }

  function chooseBlock(next) {
    block = next;
    refresh(true);
    if (block !== null) chip.scrollIntoView({ block: "nearest" });
  }

  function wanted(peer) {
    if (block !== null && ![...(peer.blocks ? [peer.blocks] : []), ...(peer.experts?.runs ?? [])].some(([start, end]) => start <= block && block < end)) return false;
    if (kind === "online" && (peer.state !== "online" || peer.silent)) return false;
    if (kind === "trouble" && !(peer.silent || peer.state === "gone" || peer.state === "paused")) return false;
    return !word || [peer.label, peer.id, peer.version, peer.dtype, peer.connection, peerState(peer).word].some((part) => String(part ?? "").toLowerCase().includes(word));
  }

  function refresh(sort) {
    const found = all.filter(wanted);
    const held = !sort && (scroll.matches(":hover") || scroll.contains(document.activeElement));
    if (held) {
      const place = new Map(settled.map((id, at) => [id, at]));
      found.sort((a, b) => (place.get(a.id) ?? Infinity) - (place.get(b.id) ?? Infinity));
    } else {
      const sign = order.down ? -1 : 1;
      found.sort((a, b) => sign * order.column.less(a, b) || text(a.id, b.id));
    }
    rows = found;
    settled = rows.map((peer) => peer.id);
    COLUMNS.forEach((column, at) => setAttribute(heads[at], "aria-sort", column === order.column ? (order.down ? "descending" : "ascending") : null));
    chip.hidden = block === null;
    setText(chip, block === null ? "" : `Block ${block} ✕`);
    setAttribute(chip, "aria-label", `Only peers with block ${block}. Show all peers`);
    setText(total, rows.length === all.length ? kinds(all) : `${count(rows.length)} of ${count(all.length)}`);
    none.hidden = rows.length > 0 || all.length === 0;
    setAttribute(table, "aria-rowcount", rows.length + 1);
    draw();
  }

  function draw() {
    const first = Math.max(0, Math.floor(scroll.scrollTop / ROW) - SPARE);
    const last = Math.min(rows.length, Math.ceil((scroll.scrollTop + (scroll.clientHeight || 640)) / ROW) + SPARE);
    space(before, first);
    space(after, rows.length - last);
    const focused = body.contains(document.activeElement);
    reconcile(body, rows.slice(first, last), (peer) => peer.id, row, (node, peer) => fill(node, peer, blocks));
    [...body.children].forEach((node, at) => setAttribute(node, "aria-rowindex", first + at + 2));
    if (focused && !body.contains(document.activeElement)) scroll.focus({ preventScroll: true });
  }

  function walk(event) {
    const link = event.target.closest?.("a");
    const to = { ArrowDown: 1, ArrowUp: -1, Home: -Infinity, End: Infinity }[event.key];
    if (!link || to === undefined) return;
    event.preventDefault();
    const at = rows.findIndex((peer) => peer.id === link.closest("tr").dataset.key);
    const next = Math.max(0, Math.min(rows.length - 1, at + to));
    const top = next * ROW;
    if (top < scroll.scrollTop) scroll.scrollTop = top;
    else if (top + 2 * ROW > scroll.scrollTop + scroll.clientHeight) scroll.scrollTop = top + 2 * ROW - scroll.clientHeight;
    draw();
    body.querySelector(`[data-key="${CSS.escape(rows[next].id)}"] a`)?.focus({ preventScroll: true });
  }

  search.addEventListener("input", () => { word = search.value.trim().toLowerCase(); refresh(true); });
  states.addEventListener("change", () => { kind = states.value; refresh(true); });
  scroll.addEventListener("scroll", draw, { passive: true });
  scroll.addEventListener("keydown", walk);

  return {
    node: h("div", {}, scroll, none),
    controls: [total, chip, states, search],
    chooseBlock,
    update(peers, of, at_s) {
      all = peers.map((peer) => ({ ...peer, up_s: upTime(peer, at_s) }));
      blocks = of;
      refresh(false);
    },
  };
}

const space = (body, rows) => {
  body.hidden = rows <= 0;
  setStyle(body.firstElementChild.firstElementChild, "height", `${Math.max(0, rows) * ROW}px`);
};

function row() {
  const link = h("a", {}, h("span", { class: "peer-name" }), h("span", { class: "peer-id" }));
  const state = h("td", { class: "c-state" }, h("span", { class: "state" }, h("span", { "aria-hidden": "true" }), h("span", {})));
  const blocks = h("td", { class: "c-blocks" }, h("span", { class: "span-track", "aria-hidden": "true" }, h("i", {})), h("span", {}));
  const cache = h("td", { class: "c-cache" }, h("span", { class: "room", "aria-hidden": "true" }, h("i", {})), h("span", {}));
  const plain = ["speed", "delay", "queue"].map((id) => h("td", { class: `c-${id} numeric` }));
  const rest = ["route", "precision", "version", "uptime"].map((id) => h("td", { class: `c-${id}` }));
  return h("tr", {}, h("th", { scope: "row", class: "c-peer" }, link), state, blocks, plain, cache, rest);
}

function fill(node, peer, blocks) {
  const [name, state, held, speed, delay, queue, cache, route, exact, version, uptime] = node.children;
  const link = name.firstElementChild;
  setAttribute(link, "href", `/peers/${encodeURIComponent(peer.id)}`);
  setAttribute(link, "title", peer.id);
  setText(link.firstElementChild, peer.name ?? "");
  setText(link.lastElementChild, shortId(peer.id));
  fillState(state.firstElementChild, peer);
  const runs = peer.experts?.runs;
  const there = peer.blocks ?? (runs ? [runs[0][0], runs.at(-1)[1]] : null);
  fillSpan(held.firstElementChild.firstElementChild, there, blocks);
  held.firstElementChild.firstElementChild.classList.toggle("of-experts", !peer.blocks);
  setText(held.lastElementChild, holds(peer));
  setAttribute(held, "title", expertFacts(peer) || null);
  held.firstElementChild.hidden = !there;
  setText(speed, peer.role === "host" ? number(peer.positions_per_s) : "–");
  setText(delay, seconds(peer.delay_s));
  setText(queue, peer.blocks ? seconds(peer.queue_s) : "–");
  const free = peer.cache_bytes_limit > 0 ? peer.cache_bytes_free / peer.cache_bytes_limit : null;
  cache.firstElementChild.hidden = free === null;
  setStyle(cache.firstElementChild.firstElementChild, "width", `${(free ?? 0) * 100}%`);
  setText(cache.lastElementChild, free === null ? "–" : bytes(peer.cache_bytes_free));
  setAttribute(cache, "title", free === null ? null : `${percent(free)} of ${bytes(peer.cache_bytes_limit)} free`);
  setText(route, peer.connection === "unknown" ? "–" : peer.connection);
  setText(exact, peer.dtype ?? "–");
  setText(version, peer.version || "–");
  setText(uptime, peer.started_s ? duration(peer.up_s) : "–");
  setAttribute(uptime, "title", peer.started_s ? `since ${dateTime(peer.started_s)}` : null);
}

const holds = (peer) => (peer.blocks ? span(peer.blocks) : peer.experts ? plural(peer.experts.count, "expert") : peer.role === "experts" ? "no experts" : "worker");

/** Seconds that a peer has run, until its last sign if it is gone; null if unknown. */
export const upTime = (peer, now_s) => (peer.started_s ? (peer.state === "gone" ? peer.last_seen_s : now_s) - peer.started_s : null);

/** The number of peers by kind: "22 of this model · 5 workers · 1 gone". */
function kinds(peers) {
  const gone = peers.filter((peer) => peer.state === "gone").length;
  const workers = peers.filter((peer) => peer.state !== "gone" && peer.role === "worker").length;
  const parts = [[peers.length - gone - workers, "of this model"], [workers, workers === 1 ? "worker" : "workers"], [gone, "gone"]];
  return parts.filter(([n]) => n).map(([n, word]) => `${count(n)} ${word}`).join(" · ");
}

/** The experts that a peer computes for others, and those that others compute for it; empty: none. */
export function expertFacts(peer) {
  const facts = [];
  if (peer.experts) facts.push(`computes experts ${peer.experts.text} (blocks:experts) for other hosts: ${number(peer.experts.rows_per_s)} rows/s, ${plural(peer.experts.streams, "stream")}`);
  if (peer.trunk) facts.push(`${plural(peer.trunk.peers, "peer")} compute ${plural(peer.trunk.lacks, "expert")} of its blocks${peer.trunk.missing ? `; ${count(peer.trunk.missing)} missing: ${peer.trunk.missing_text}` : ""}`);
  return facts.join("; ");
}

/** Fills a `.state` node with symbol, word and colour. */
export function fillState(node, peer) {
  const { symbol, word, kind } = peerState(peer);
  setAttribute(node, "data-kind", kind);
  setText(node.firstElementChild, symbol);
  setText(node.lastElementChild, word);
}

/** Places the bar of a span on its track of all blocks. */
export function fillSpan(node, held, blocks) {
  node.hidden = !held;
  if (!held) return;
  setStyle(node, "margin-inline-start", `${(held[0] / blocks) * 100}%`);
  setStyle(node, "width", `max(3px, ${((held[1] - held[0]) / blocks) * 100}%)`);
}
