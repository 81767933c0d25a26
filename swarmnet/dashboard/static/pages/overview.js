/** The overview: one model at a time, with its peers, history and events. */

import { commandNode, h, reconcile, panel, s, setAttribute, setText } from "../dom.js";
import { modelName, plural, shortId } from "../format.js";
import { EXPLANATIONS, health } from "../words.js";
import { chains } from "../views/chains.js";
import { coverage } from "../views/coverage.js";
import { expertMap } from "../views/experts.js";
import { headline } from "../views/headline.js";
import { history } from "../views/history.js";
import { advice, contributionList, eventFeed, jobList } from "../views/lists.js";
import { memberLists } from "../views/members.js";
import { peerTable } from "../views/peers.js";

const CONTRIBUTIONS_EVERY_MS = 30_000;

/** {node, title, update(state)}. */
export function overviewPage() {
  let state = null;
  let chosen = new URLSearchParams(location.search).get("model");
  const top = headline();
  const picture = chains();
  const table = peerTable();
  const bar = coverage({ onBlock: picture.highlight, onChosen: table.chooseBlock });
  const experts = expertMap({ onChosen: table.chooseBlock });
  const charts = history();
  const next = advice();
  const feed = eventFeed();
  const jobs = jobList();
  const shares = contributionList((found) => { given.hidden = !found; });
  const owners = memberLists((found) => { members.hidden = !found; });
  const tabs = h("nav", { class: "models", "aria-label": "Models" });
  const emptyState = empty();
  const facts = h("span", { class: "quiet panel-note" });

  const figure = panel("Blocks and chains", { id: "blocks", aside: [picture.button], note: facts }, bar.node, experts.node, picture.node);
  const peers = panel("Peers", { id: "peers", aside: table.controls }, table.node);
  const members = panel("Members", { id: "members" }, owners.node);
  const training = panel("Training jobs", { id: "jobs" }, jobs.node);
  const given = panel("Contributions, 30 days", { id: "contributions", note: h("span", { class: "quiet panel-note" }, "bars: share of all work of that kind") }, shares.node);
  members.hidden = given.hidden = true;
  const model = h("div", { class: "model" }, top.node, figure);
  const node = h("div", { class: "overview" }, tabs, emptyState.node, model,
    h("div", { class: "columns" },
      panel("History", { id: "history", aside: [charts.controls] }, charts.node),
      h("div", { class: "side" }, panel("What to host next", { id: "next" }, next.node), panel("Events", { id: "events" }, feed.node))),
    peers, members,
    h("div", { class: "columns even" }, training, given), explanations());

  async function contributions() {
    try {
      const answer = await fetch("/api/v1/contributions?window=30d");
      if (answer.ok) shares.update(await answer.json());
    } catch {
      // The connection is lost, which the page shows already; the list keeps its data.
    }
  }
  contributions();
  setInterval(() => { if (!document.hidden) contributions(); }, CONTRIBUTIONS_EVERY_MS);

  function choose(manifest) {
    chosen = manifest;
    const query = new URLSearchParams(location.search);
    query.set("model", manifest);
    window.history.replaceState(null, "", `?${query}`);
    update(state);
  }

  function update(fresh) {
    state = fresh;
    const models = Object.entries(state.models).map(([id, each]) => ({ id, ...each })).sort((a, b) => b.peers - a.peers || (a.id < b.id ? -1 : 1));
    const shown = models.find(({ id }) => id === chosen) ?? models[0] ?? null;
    const allPeers = Object.entries(state.peers).map(([id, peer]) => ({ id, label: peer.name || shortId(id), ...peer }));
    tabs.hidden = models.length < 2;
    reconcile(tabs, models, ({ id }) => id, ({ id }) => tab(() => choose(id)), (each, of) => fillTab(each, of, of === shown));
    emptyState.node.hidden = shown !== null;
    emptyState.update(state);
    for (const part of [model, node.querySelector("#history"), node.querySelector("#next")]) part.hidden = shown === null;
    node.classList.toggle("no-model", shown === null);
    const there = allPeers.filter((peer) => shown === null || peer.model === shown.id || !state.models[peer.model]);
    if (shown) {
      const hosts = there.filter((peer) => peer.model === shown.id && peer.blocks && peer.role !== "worker");
      top.update(shown);
      setText(facts, `${modelName(shown.name)} · ${plural(shown.blocks, "block")}; a range such as 4:10 is blocks 4 to 9`);
      setAttribute(facts, "title", `${shown.name}, manifest ${shown.id}`);
      bar.update(shown, hosts.filter((peer) => peer.state === "online" && !peer.silent), modelName(shown.name));
      experts.update(shown, modelName(shown.name));
      picture.update(shown, hosts, Object.values(state.flows).filter((flow) => flow.model === shown.id));
      charts.show(shown.id);
      next.update(shown.advice);
    }
    table.update(there, shown?.blocks ?? 1, state.swarm.now_s);
    peers.hidden = allPeers.length === 0;
    feed.update(state.events, state.swarm.now_s);
    training.hidden = Object.keys(state.jobs).length === 0;
    jobs.update(Object.entries(state.jobs).map(([id, job]) => ({ id, ...job })), state.swarm.now_s);
    owners.name(state.peers, state.swarm.now_s);
  }

  return { node, update, title: (of) => of.swarm.name };
}

function tab(onclick) {
  return h("button", { type: "button", onclick }, h("span", { class: "tab-symbol" }), h("span", { class: "tab-name" }), s("svg", { class: "spark", height: 14, width: 96, preserveAspectRatio: "none", "aria-hidden": "true" }), h("span", { class: "quiet" }));
}

/** Fills a model's tab: health, name, a small bar of its blocks, and the number of peers. */
function fillTab(node, model, shown) {
  const { symbol, kind, title } = health(model);
  const [sign, name, spark, note] = node.children;
  setAttribute(node, "aria-current", shown ? "true" : null);
  setAttribute(sign, "data-kind", kind);
  setAttribute(sign, "title", title);
  setText(sign, symbol);
  setText(name, modelName(model.name));
  setText(note, plural(model.peers, "peer"));
  setAttribute(spark, "viewBox", `0 0 ${model.blocks} 1`);
  const most = Math.max(3, ...model.replicas);
  reconcile(spark, model.replicas.map((n, block) => ({ n, block })), ({ block }) => block, () => s("rect", { width: 1.02 }), (rect, { n, block }) => {
    const tall = n ? Math.max(0.25, n / most) : 1;
    setAttribute(rect, "class", `spark-${Math.min(3, n)}`);
    setAttribute(rect, "x", block);
    setAttribute(rect, "y", 1 - tall);
    setAttribute(rect, "height", tall);
  });
}

function explanations() {
  return h("details", { class: "panel fold" }, h("summary", {}, "What the numbers mean"),
    h("dl", { class: "meanings" }, Object.entries(EXPLANATIONS).map(([name, text]) => h("div", {}, h("dt", {}, name), h("dd", {}, text)))));
}

/** The page of a swarm in which no model is hosted. */
function empty() {
  const text = h("p", {});
  const join = commandNode("");
  const ask = commandNode("");
  const node = h("section", { class: "empty-state", "aria-labelledby": "empty-title" },
    h("h1", { id: "empty-title" }, "No peers yet"), text,
    h("ol", {},
      h("li", {}, h("span", {}, "On a computer with free memory, host some blocks of a model:"), join),
      h("li", {}, h("span", {}, "When every block has a host, ask a question:"), ask)));
  return {
    node,
    update({ swarm, peers }) {
      const others = Object.keys(peers).length;
      setText(node.querySelector("h1"), others ? "No hosted model yet" : "No peers yet");
      setText(text, others
        ? `${swarm.name} has ${plural(others, "peer")}, and none of them hosts blocks of a model. This page updates itself when one does.`
        : `No peer of ${swarm.name} has announced itself. This page updates itself when one does.`);
      join.setCommand(`swarmnet join ${swarm.join && `${swarm.join} `}--model smollm2-135m-instruct`);
      ask.setCommand(`swarmnet run smollm2-135m-instruct "What is the capital of France?" --swarm ${swarm.join || swarm.name}`);
    },
  };
}
