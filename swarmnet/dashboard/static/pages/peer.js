/** The page of one peer. */

import { h, panel, setText } from "../dom.js";
import { ago, bytes, count, dateTime, duration, modelName, number, percent, plural, seconds, shortId, span } from "../format.js";
import { chart } from "../views/charts.js";
import { eventFeed, workText } from "../views/lists.js";
import { fillSpan, fillState, upTime } from "../views/peers.js";
import { EXPLANATIONS, linkOf } from "../words.js";
import { factList, missing, poll } from "./detail.js";

/** {node, title, update(state)}; history and contribution come from `/api/v1/peers/ID`. */
export function peerPage(id) {
  const title = h("h1", {}, shortId(id));
  const state = h("span", { class: "state" }, h("span", { "aria-hidden": "true" }), h("span", {}));
  const held = h("i", {});
  const holds = h("p", {});
  const facts = factList();
  const speed = chart({ title: "Positions per second", format: number, group: "peer", series: [{ label: "", color: "--c1", shape: "area" }] });
  const delay = chart({ title: "Delay, half of a round trip from this dashboard", format: seconds, group: "peer", series: [{ label: "", color: "--c2", shape: "line" }] });
  const feed = eventFeed({ short: true });
  const gave = factList();
  const found = h("div", {},
    h("div", { class: "detail-head" }, title, state),
    h("p", { class: "full-id" }, id),
    panel("Blocks", { id: "span" }, h("div", { class: "span-track wide", "aria-hidden": "true" }, held), holds),
    h("div", { class: "columns" },
      h("div", { class: "side" }, panel("Last 24 hours", { id: "history" }, h("div", { class: "chart-grid" }, speed.node, delay.node)), panel("Events", { id: "events" }, feed.node)),
      h("div", { class: "side" }, panel("Now", { id: "now" }, facts.node), panel("Contribution", { id: "contribution" }, gave.node))));
  const absent = missing("This peer is not known", "It has not been in the swarm in the last minutes, or its id is wrong.");
  const node = h("div", { class: "detail" }, h("p", { class: "crumb" }, h("a", { href: "/#peers-title" }, "← All peers")), found, absent);
  let now_s = 0;

  const more = poll(`/api/v1/peers/${encodeURIComponent(id)}`, (data) => {
    show(data);
    speed.update(data.history.at_s, [data.history.positions_per_s]);
    delay.update(data.history.at_s, [data.history.delay_s]);
    feed.update(data.events, now_s);
    gave.update([
      ["Work, 24 h", workText(data.contribution["24h"])], ["Work, 30 days", workText(data.contribution["30d"])],
      ["Online, 24 h", percent(data.contribution.uptime_24h), "of the time that this dashboard observed the swarm"],
      ...givenRows(data.given),
    ]);
  }, (is) => { found.hidden = !is; absent.hidden = is; });

  function show(peer, models = null) {
    setText(title, peer.name || shortId(id));
    fillState(state, peer);
    const model = models?.[peer.model];
    if (model && peer.blocks) {
      fillSpan(held, peer.blocks, model.blocks);
      setText(holds, `Blocks ${span(peer.blocks)} of 0:${model.blocks} of ${modelName(model.name)}. ${without(peer, model)}`);
    } else if (peer.experts) setText(holds, `${plural(peer.experts.count, "expert")}: ${peer.experts.text} (blocks:experts).`);
    else if (!peer.blocks) setText(holds, peer.job ? "This peer trains, and hosts no blocks." : "This peer hosts no blocks.");
    held.parentElement.hidden = !model || !peer.blocks;
    facts.update([
      ["Positions computed", `${number(peer.positions_per_s)} /s`, EXPLANATIONS["Positions/s"]], ["Time of a step", seconds(peer.step_s)], ["Delay", seconds(peer.delay_s)], ["Link", linkOf(peer)],
      ["Queue", peer.queue_s > 0 ? seconds(peer.queue_s) : "empty"], ["Sessions", count(peer.sessions)],
      ["Free cache", peer.cache_bytes_limit > 0 ? `${bytes(peer.cache_bytes_free)} of ${bytes(peer.cache_bytes_limit)}` : "–"],
      ["Precision", peer.dtype ?? "–"], ["Arithmetic", peer.arithmetic ?? "–"], ["Version", peer.version || "–"],
      [peer.state === "gone" ? "Ran for" : "Running for", peer.started_s ? duration(upTime(peer, now_s)) : "–", dateTime(peer.started_s)], ["Positions since its start", count(peer.positions)],
      ...expertRows(peer),
      ["Last report", peer.last_seen_s === null || peer.last_seen_s === undefined ? "now" : ago(now_s - peer.last_seen_s), dateTime(peer.last_seen_s)],
    ]);
  }

  return {
    node,
    title: () => title.textContent,
    update(all) {
      now_s = all.swarm.now_s;
      if (all.peers[id]) show(all.peers[id], all.models);
      more.start();
    },
  };
}

/** What the peer says it has given since its data directory exists, as `swarmnet stats` prints it. */
function givenRows(given) {
  return given?.since ? [
    ["Given since", dateTime(given.since)], ["Computed", `${number(given.block_positions)} positions × blocks`, "each position counts once for every block that it passed, in training twice"],
    ["Clients served", count(given.clients)], ["Training", plural(given.samples, "sample")], ["Traffic", `${bytes(given.sent_bytes)} sent, ${bytes(given.received_bytes)} received`],
    ["Time of serving or training", duration(given.active_s)], ["Energy, estimated", `${number(given.kwh)} kWh`],
  ] : [];
}

/** Facts about the experts that the peer computes for others, and about those that others compute for it. */
function expertRows({ experts, trunk }) {
  const own = experts ? [
    ["Experts for other hosts", count(experts.count), experts.text], ["Rows for other hosts", `${number(experts.rows_per_s)} rows/s`], ["Streams of hosts", count(experts.streams)],
  ] : [];
  return trunk ? [
    ...own, ["Experts on peers", count(trunk.lacks)], ["Peers that compute them", `${count(trunk.peers)}${trunk.far ? `, ${count(trunk.far)} too far` : ""}`],
    ["Longest round trip", seconds(trunk.round_trip_s)], ["Missing experts", trunk.missing ? count(trunk.missing) : "none", trunk.missing_text || null], ["Rows asked of peers", count(trunk.rows)],
    ["Requests failed, slow", `${count(trunk.failed)}, ${count(trunk.hedged)}`], ["Experts loaded for lack of a peer", count(trunk.loaded)],
  ] : own;
}

/** What happens to the model if the peer leaves. */
function without(peer, model) {
  if (peer.state === "leaving") return "The peer is leaving: its sessions move to other hosts.";
  if (peer.state === "incompatible") return "The peer runs another version of the protocol: peers of this version cannot use it.";
  if (peer.trunk?.missing) return `It waits for experts that no peer within its reach has: ${peer.trunk.missing_text} (blocks:experts).`;
  if (peer.state !== "online" || peer.silent) return "The peer does not serve them at present.";
  const left = Math.min(...model.replicas.slice(...peer.blocks)) - 1;
  return left < 1 ? "Some of them have no other host: if this peer leaves, the model cannot answer." : `If this peer leaves, each of them still has ${plural(left, "other host")} or more.`;
}
