/** The lists of the pages: advice on what to host, events, training jobs, contributions. */

import { announce, commandNode, h, reconcile, setAttribute, setStyle, setText } from "../dom.js";
import { ago, bytes, count, dateTime, number, percent, plural, shortId } from "../format.js";
import { lossChart } from "./charts.js";
import { EVENT_KINDS, capital, jobState } from "../words.js";

/** `update(advice)` shows the reason and the command; null hides both. */
export function advice() {
  const reason = h("p", {});
  const command = commandNode("");
  const node = h("div", { class: "advice" }, reason, command);
  return {
    node,
    update(next) {
      node.hidden = !next;
      if (!next) return;
      setText(reason, `${capital(next.reason)}.`);
      command.setCommand(next.command);
    },
  };
}

const ANNOUNCE_EVERY_S = 8; // seconds between announcements to screen readers; a failing swarm has many events

/** `update(events, now_s)`: events, newest first. New ones are announced to screen readers together. */
export function eventFeed({ short = false } = {}) {
  const list = h("ol", { class: "events", tabindex: short ? null : 0, "aria-label": "Events, newest first" });
  const none = h("p", { class: "quiet" }, "No events yet. Peers that join, leave or fail are listed here.");
  let newest = null;
  let announced_s = 0;
  return {
    node: h("div", {}, list, none),
    update(events, now_s) {
      none.hidden = events.length > 0;
      list.hidden = events.length === 0;
      reconcile(list, events, (event) => `${event.at_s}|${event.kind}|${event.peer_id}|${event.text}`, eventNode, (node, event) => {
        const time = node.lastElementChild;
        setText(time, ago(now_s - event.at_s));
        setAttribute(time, "title", dateTime(event.at_s));
      });
      const fresh = newest === null ? [] : events.filter((event) => event.at_s > newest);
      if (fresh.length && now_s - announced_s > ANNOUNCE_EVERY_S) {
        announce(fresh.length === 1 ? fresh[0].text : `${plural(fresh.length, "event")}, the newest: ${fresh[0].text}`);
        announced_s = now_s;
        newest = events[0].at_s;
      }
      newest ??= events[0]?.at_s ?? 0;
    },
  };
}

function eventNode(event) {
  const { symbol, kind } = EVENT_KINDS[event.kind] ?? { symbol: "·", kind: "quiet" };
  const text = event.peer_id ? h("a", { href: `/peers/${encodeURIComponent(event.peer_id)}`, title: event.peer_id }, event.text) : capital(event.text);
  return h("li", {}, h("span", { class: "event-symbol", "data-kind": kind, "aria-hidden": "true" }, symbol),
    h("span", { class: "event-text" }, text), h("time", {}));
}

const CURVES = 3; // jobs whose loss is drawn; further jobs have no chart
const CURVE_EVERY_MS = 30_000;

/** `update(jobs, now_s)`: the progress of each job, and a chart of the loss of the first few. Jobs with workers come first. Jobs have an `id`. */
export function jobList() {
  const curves = new Map();

  async function draw() {
    for (const [id, { update }] of curves) {
      try {
        const answer = await fetch(`/api/v1/jobs/${encodeURIComponent(id)}`);
        if (!answer.ok) continue;
        const { curve } = await answer.json();
        update(curve.tokens, [curve.loss, curve.val_loss]);
      } catch {
        return; // the connection is lost, which the page shows already; the charts keep their data
      }
    }
  }

  function curveOf({ id }) {
    const made = lossChart(120);
    curves.set(id, made);
    return made.node;
  }

  setInterval(() => { if (!document.hidden) draw(); }, CURVE_EVERY_MS);
  const list = h("ul", { class: "jobs" });
  const ended = h("ul", { class: "jobs" });
  const count_ = h("summary", {});
  const fold = h("details", { class: "fold" }, count_, ended);
  const fill = (now_s) => (node, job) => {
    const [head, facts, track] = node.firstElementChild.children;
    setAttribute(node.firstElementChild, "href", `/jobs/${encodeURIComponent(job.id)}`);
    setText(head.firstElementChild, job.name ?? shortId(job.id));
    setText(head.lastElementChild, `${job.method} · ${jobState(job)}${job.ended_s && job.round ? ` · ${ago(now_s - job.ended_s)}` : ""}`);
    const parts = [`round ${count(job.round)} of ${count(job.rounds)}`, job.workers ? plural(job.workers, "worker") : null, `${bytes(job.bytes_sent)} sent`];
    if (typeof job.loss === "number") parts.unshift(`loss ${number(job.loss)}`);
    setText(facts, parts.filter(Boolean).join(" · "));
    setStyle(track.firstElementChild, "width", `${job.rounds ? Math.min(100, (job.round / job.rounds) * 100) : 0}%`);
  };
  return {
    node: h("div", {}, list, fold),
    update(jobs, now_s) {
      const drawn = curves.size;
      const running = jobs.filter((job) => job.workers > 0);
      const others = jobs.filter((job) => !job.workers).sort((a, b) => b.ended_s - a.ended_s);
      fold.hidden = others.length === 0;
      setText(count_, `${plural(others.length, "job")} without workers, kept for 30 days`);
      if (!running.length && !fold.dataset.seen) fold.open = true;
      fold.dataset.seen = "yes";
      reconcile(list, running, (job) => job.id, (job) => jobNode(curves.size < CURVES ? curveOf(job) : null), fill(now_s));
      reconcile(ended, others, (job) => job.id, () => jobNode(null), fill(now_s));
      for (const id of curves.keys()) if (!running.some((job) => job.id === id)) curves.delete(id);
      if (curves.size !== drawn) draw();
    },
  };
}

const jobNode = (curve) => h("li", {}, h("a", {}, h("span", { class: "job-head" }, h("strong", {}), h("span", { class: "quiet" })),
  h("span", { class: "job-facts" }), h("span", { class: "track", "aria-hidden": "true" }, h("i", {}))), curve);

/** The work of a peer in words: "1.38 G positions × blocks, 120 samples trained". */
export function workText({ block_positions, expert_rows, samples }) {
  const parts = [
    block_positions ? `${number(block_positions)} positions × blocks` : null, expert_rows ? `${number(expert_rows)} rows of experts` : null,
    samples ? `${plural(samples, "sample")} trained` : null,
  ].filter(Boolean);
  return parts.join(", ") || "none";
}

/** `update(rows)`: the ten peers with the largest shares of the work. Calls `onFound(found)`. */
export function contributionList(onFound) {
  const list = h("ol", { class: "shares" });
  return {
    node: list,
    update(rows) {
      const best = rows.filter((row) => row.share > 0).slice(0, 10);
      onFound(best.length > 0);
      reconcile(list, best, (row) => row.peer_id, shareNode, (node, row) => fillShare(node, row.peer_id, row.name, row.share, workText(row),
        `${percent(row.share)} of all work of its kind; online ${percent(row.uptime)} of the observed time`));
    },
  };
}

export const shareNode = () => h("li", {}, h("a", {}), h("span", { class: "share-value" }), h("span", { class: "track", "aria-hidden": "true" }, h("i", {})));

export function fillShare(node, peer_id, name, share, text, title) {
  const [link, value, track] = node.children;
  setAttribute(link, "href", `/peers/${encodeURIComponent(peer_id)}`);
  setAttribute(link, "title", peer_id);
  setText(link, name ?? shortId(peer_id));
  setText(value, text);
  setAttribute(value, "title", title || null);
  setStyle(track.firstElementChild, "width", `${Math.max(0, Math.min(100, share * 100))}%`);
}
