/** The members of a private swarm and the invites that are still open, for its owner. */

import { h, reconcile, setAttribute, setText } from "../dom.js";
import { dateTime, plural, shortId } from "../format.js";

const EVERY_MS = 30_000;
const at = (iso) => dateTime(Date.parse(iso) / 1000);

/** Loads the lists every half a minute. `onFound(found)` is told whether this page has them. */
export function memberLists(onFound) {
  const members = h("ol", { class: "shares" });
  const none = h("p", { class: "quiet" }, "No issuer on this machine has admitted a member yet.");
  const invites = h("ol", { class: "shares" });
  const title = h("h3", {}, "Open invites");

  async function load() {
    try {
      const answer = await fetch("/api/v1/members");
      const lists = answer.ok ? await answer.json() : null;
      onFound(lists !== null);
      if (lists) update(lists);
    } catch {
      // The connection is lost, which the page shows already; the lists keep their data.
    }
  }

  function update(lists) {
    none.hidden = lists.members.length > 0;
    members.hidden = !none.hidden;
    title.hidden = invites.hidden = lists.invites.length === 0;
    reconcile(members, lists.members, ({ peer_id, invite }) => `${peer_id}|${invite}`, line, (node, row) => fill(node,
      row.name || row.label || shortId(row.peer_id), row.client ? `${row.peer_id}, with its client ${row.client}` : row.peer_id,
      `${row.state} · ${row.roles.join(", ")}`, row.last_seen ? `seen ${at(row.last_seen)}` : "not seen yet"));
    reconcile(invites, lists.invites, ({ id }) => id, line, (node, row) => fill(node,
      row.label || `…${row.id.slice(-6)}`, row.id, `${row.roles.join(", ")} · ${plural(row.uses - row.used, "use")} left`, `until ${at(row.expires)}`));
  }

  load();
  setInterval(() => { if (!document.hidden) load(); }, EVERY_MS);
  return { node: h("div", {}, members, none, title, invites) };
}

const line = () => h("li", {}, h("strong", {}), h("span", { class: "share-value" }), h("span", { class: "quiet" }));

function fill(node, name, id, facts, when) {
  const [label, value, note] = node.children;
  setText(label, name);
  setAttribute(label, "title", id);
  setText(value, facts);
  setText(note, when);
}
