/** Parts that the pages of a peer and of a job share. */

import { h, reconcile, setAttribute, setText } from "../dom.js";

const EVERY_MS = 15_000;

/** A list of names and values: `update([[name, value, title?], …])`. */
export function factList() {
  const node = h("dl", { class: "facts" });
  return {
    node,
    update(rows) {
      reconcile(node, rows, ([name]) => name, ([name]) => h("div", {}, h("dt", {}, name), h("dd", {})), (row, [, value, title]) => {
        setText(row.lastElementChild, value);
        setAttribute(row.lastElementChild, "title", title);
      });
    },
  };
}

export function missing(title, text) {
  return h("div", { class: "empty-state", hidden: true }, h("h1", {}, title), h("p", {}, text), h("p", {}, h("a", { href: "/" }, "Back to the swarm")));
}

/** Once started, fetches `url` every 15 s. Calls `onData(json)`, and `onFound(false)` while the server answers 404. */
export function poll(url, onData, onFound) {
  let started = false;
  async function load() {
    try {
      const answer = await fetch(url);
      onFound(answer.status !== 404);
      if (answer.ok) onData(await answer.json());
    } catch (error) {
      if (!(error instanceof TypeError)) throw error; // fetch throws TypeError for a lost connection, which the page shows already
    }
  }
  return {
    start() {
      if (started) return;
      started = true;
      load();
      setInterval(() => { if (!document.hidden) load(); }, EVERY_MS);
    },
  };
}
