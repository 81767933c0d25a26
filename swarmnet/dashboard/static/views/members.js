/** The members of a private swarm and the invites that are still open, for its owner. */

import { h, reconcile, setAttribute, setText } from "../dom.js";
import { ago, dateTime, plural, shortId } from "../format.js";

const EVERY_MS = 30_000;
const at = (iso) => dateTime(Date.parse(iso) / 1000);

/** Loads the lists every half a minute. `onFound(found)` is told whether this page has them. */
export function memberLists(onFound) {
  const members = h("ol", { class: "shares" });
  const none = h("p", { class: "quiet" }, "No members yet. This computer admits them.");
  const invites = h("ol", { class: "shares" });
  const title = h("h3", { class: "list-title" }, "Open invites");

  let lists = { members: [], invites: [] };
  let peers = {};
  let now_s = 0;

  async function load() {
    try {
      const answer = await fetch("/api/v1/members");
      const found = answer.ok ? await answer.json() : null;
      onFound(found !== null);
      lists = found ?? lists;
      draw();
    } catch {
      // The connection is lost, which the page shows already; the lists keep their data.
    }
  }

  function draw() {
    none.hidden = lists.members.length > 0;
    members.hidden = !none.hidden;
    title.hidden = invites.hidden = lists.invites.length === 0;
    reconcile(members, lists.members, ({ peer_id, invite }) => `${peer_id}|${invite}`, line, (node, row) => fill(node,
      nameOf(row), row.client ? `${row.peer_id}, with its client ${row.client}` : row.peer_id,
      `${row.state} · ${row.roles.join(", ")}`, seen(row)));
    reconcile(invites, lists.invites, ({ id }) => id, line, (node, row) => fill(node,
      row.label || `…${row.id.slice(-6)}`, row.id, `${row.roles.join(", ")} · ${plural(row.uses - row.used, "use")} left`, `until ${at(row.expires)}`));
  }

  /** The name that its node chose, and the label of its invite. */
  function nameOf(row) {
    const names = [row.name || peers[row.peer_id]?.name, row.label].filter(Boolean);
    return [...new Set(names)].join(" · ") || shortId(row.peer_id);
  }

  function seen(row) {
    const peer = peers[row.peer_id];
    if (peer && peer.state !== "gone" && !peer.silent) return "in the swarm now";
    const seen_s = Math.max(peer?.last_seen_s ?? 0, row.last_seen ? Date.parse(row.last_seen) / 1000 : 0);
    return seen_s ? `seen ${ago(now_s - seen_s)}` : "not seen yet";
  }

  load();
  setInterval(() => { if (!document.hidden) load(); }, EVERY_MS);
  return {
    node: h("div", {}, members, none, title, invites),
    /** Joins the lists with the peers of the swarm, which have names. */
    name(next, at_s) {
      peers = next;
      now_s = at_s;
      draw();
    },
  };
}

const line = () => h("li", {}, h("strong", {}), h("span", { class: "share-value" }), h("span", { class: "quiet" }));

function fill(node, name, id, facts, when) {
  const [label, value, note] = node.children;
  setText(label, name);
  setAttribute(label, "title", id);
  setText(value, facts);
  setText(note, when);
}
