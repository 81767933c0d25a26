/** Symbols and sentences for states, events and the health of a model. Pure functions of the state. */

import { count, plural, shortId, span } from "./format.js";

/** Symbol, word and colour of each state. The symbols differ in shape, so that states can be told apart without colour. */
export const PEER_STATES = {
  online: { symbol: "●", word: "online", kind: "good" },
  joining: { symbol: "◔", word: "joining", kind: "quiet" },
  leaving: { symbol: "◒", word: "leaving", kind: "quiet" },
  paused: { symbol: "‖", word: "paused", kind: "quiet" },
  incompatible: { symbol: "≠", word: "other version", kind: "warn" },
  silent: { symbol: "▲", word: "silent", kind: "warn" },
  left: { symbol: "−", word: "left in good order", kind: "quiet" },
  finished: { symbol: "✓", word: "finished its job", kind: "good" },
  lost: { symbol: "✕", word: "lost", kind: "bad" },
};

/** A peer that does not answer is shown as silent, whatever state it announced; a peer that is gone, by how it ended. */
export const peerState = (peer) =>
  PEER_STATES[peer.state === "gone" ? peer.ending : peer.silent ? "silent" : peer.state] ?? { symbol: "?", word: String(peer.state), kind: "quiet" };

/** How peers reach a peer, with its relays. */
export function linkOf(peer) {
  const relays = (peer.relays ?? []).map(shortId);
  const through = peer.connection === "relayed" && relays.length ? `relayed through ${relays.join(" and ")}` : peer.connection;
  return peer.punched > 0 ? `${through}; ${plural(peer.punched, "direct connection", "direct connections")} through routers` : through;
}

export const EVENT_KINDS = {
  joined: { symbol: "+", kind: "good" },
  left: { symbol: "−", kind: "quiet" },
  lost: { symbol: "✕", kind: "bad" },
  recovered: { symbol: "↻", kind: "good" },
  weak: { symbol: "▲", kind: "warn" },
  healed: { symbol: "✓", kind: "good" },
};

/** [start, end) of every run of blocks for which `holds(replicas)`. */
export function runs(replicas, holds) {
  const found = [];
  replicas.forEach((n, block) => {
    if (!holds(n)) return;
    const last = found.at(-1);
    if (last && last[1] === block) last[1] = block + 1;
    else found.push([block, block + 1]);
  });
  return found;
}

/** Runs of blocks as text: "blocks 4:10, 17 and 21:31". */
export function blockList(spans) {
  const isOne = ([start, end]) => end - start === 1;
  const names = spans.slice(0, 4).map((each) => (isOne(each) ? String(each[0]) : span(each)));
  if (spans.length > 4) names.push(plural(spans.length - 4, "further range", "further ranges"));
  const last = names.pop();
  return `${spans.length === 1 && isOne(spans[0]) ? "block" : "blocks"} ${names.length ? `${names.join(", ")} and ${last}` : last}`;
}

/** {kind: good | warn | bad, symbol, title, text} of one model. */
export function health(model) {
  const gaps = runs(model.replicas, (n) => n === 0);
  if (model.experts?.missing) {
    return {
      kind: "bad", symbol: "✕", title: "Experts are missing: the model cannot answer",
      text: `Hosts of blocks wait for ${plural(model.experts.missing, "expert")} that no peer within their reach has${model.experts.missing_text.length > 60 ? "" : `: ${model.experts.missing_text} (blocks:experts)`}.`,
    };
  }
  const single = runs(model.replicas, (n) => n === 1);
  if (model.peers === 0 || gaps.length === 1 && gaps[0][1] - gaps[0][0] === model.blocks) {
    return { kind: "bad", symbol: "✕", title: "No host serves this model", text: "The model can answer once hosts serve all of its blocks." };
  }
  if (gaps.length) {
    const missing = gaps.reduce((sum, [a, b]) => sum + b - a, 0);
    return {
      kind: "bad", symbol: "✕", title: "Incomplete: the model cannot answer",
      text: `No host serves ${blockList(gaps)} (${count(missing)} of ${count(model.blocks)}). The model can answer once hosts serve them.`,
    };
  }
  if (single.length) {
    return {
      kind: "warn", symbol: "▲", title: "Complete, but without spare hosts",
      text: single.length === 1 && single[0][1] - single[0][0] === 1
        ? `${capital(blockList(single))} has only one host: if it leaves, the model cannot answer.`
        : `${capital(blockList(single))} have one host each: if one of these hosts leaves, the model cannot answer.`,
    };
  }
  if (model.experts?.single) {
    return {
      kind: "warn", symbol: "▲", title: "Complete, but without spare peers for experts",
      text: `${plural(model.experts.single, "expert has", "experts have")} one peer: if it leaves, hosts answer only if they have room for its experts.`,
    };
  }
  const fewest = Math.min(...model.replicas);
  const weakest = runs(model.replicas, (n) => n === fewest);
  return {
    kind: "good", symbol: "✓", title: "Healthy",
    text: weakest[0][1] - weakest[0][0] === model.blocks
      ? `Each of the ${count(model.blocks)} blocks has ${plural(fewest, "host")}: any one of them may leave.`
      : `All ${count(model.blocks)} blocks have hosts. The fewest: ${plural(fewest, "host")}, of ${blockList(weakest)}.`,
  };
}

export const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

/** The state of a job in words. */
export function jobState({ state, round }) {
  if (state === "idle") return round ? "no worker now" : "not begun";
  return { done: "finished", waiting: "waiting for workers" }[state] ?? state;
}

/** A sentence for each number of the page. */
export const EXPLANATIONS = {
  Speed: "Tokens per second that all clients of the model receive together, between the last two reports of each host. Rejected drafts do not count.",
  Peers: "Peers that host blocks or experts of the model now. Peers that join, leave or pause count, too.",
  Sessions: "Conversations that clients have open in the swarm now.",
  "First token": "Time from the arrival of a prompt to its first token, in the last five minutes. Half of the prompts took less than the first time, and 95 % less than the second.",
  "Each token": "Time from one token of an answer to the next, in the last five minutes. Half of the tokens took less than the first time, and 95 % less than the second.",
  "Hosts of a block": "Peers that are online and can compute the block. With none, the model cannot answer.",
  "Ranges such as 4:10": "Blocks 4 to 9: the second number is the first block that is not part of the range. Commands take ranges in this form.",
  "Positions/s": "Positions that the peer computes in a second: tokens of prompts, answers and drafts. Some drafts are rejected.",
  Delay: "Half of a round trip between this dashboard and the peer.",
  Queue: "Time that new work would wait on the peer.",
  "Free cache": "Memory for the sessions of clients that is not in use, and the limit that the owner sets.",
  Uptime: "Time since the peer started. For a peer that is gone, the time from its start to its last sign.",
  Contributions: "Work in 30 days while this dashboard ran: positions times the blocks that they passed, training included, and rows of experts. A bar is the peer's share of all work of that kind.",
  "Training jobs": "A job stays here for 30 days after its last worker left. Tokens count all workers, and the loss is the mean of the workers.",
};

const ADMISSIONS = { open: "open swarm", certificate: "members only", "allow-list": "listed members" };
export const admission = (word) => ADMISSIONS[word] ?? word;
