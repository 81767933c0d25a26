/** What is going on, in words. Pure: from the state to sentences. */

import { count, plural, span } from "./format.js";

/** The shapes tell states apart without colour. */
export const PEER_STATES = {
  online: { symbol: "●", word: "online", kind: "good" },
  joining: { symbol: "◔", word: "joining", kind: "quiet" },
  leaving: { symbol: "◒", word: "leaving", kind: "quiet" },
  paused: { symbol: "‖", word: "paused", kind: "quiet" },
  silent: { symbol: "▲", word: "silent", kind: "warn" },
  gone: { symbol: "✕", word: "gone", kind: "bad" },
};

/** A peer that answers nothing is silent, whatever it said of itself last. */
export const peerState = (peer) =>
  PEER_STATES[peer.silent && peer.state !== "gone" ? "silent" : peer.state] ?? { symbol: "?", word: String(peer.state), kind: "quiet" };

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
  if (spans.length > 4) names.push(plural(spans.length - 4, "further stretch", "further stretches"));
  const last = names.pop();
  return `${spans.length === 1 && isOne(spans[0]) ? "block" : "blocks"} ${names.length ? `${names.join(", ")} and ${last}` : last}`;
}

/** {kind: good | warn | bad, symbol, title, text} of one model. */
export function health(model) {
  const gaps = runs(model.replicas, (n) => n === 0);
  const thin = runs(model.replicas, (n) => n === 1);
  if (model.peers === 0 || gaps.length === 1 && gaps[0][1] - gaps[0][0] === model.blocks) {
    return { kind: "bad", symbol: "✕", title: "Nobody hosts this model", text: "No question can be answered until hosts join." };
  }
  if (gaps.length) {
    const lacking = gaps.reduce((sum, [a, b]) => sum + b - a, 0);
    return {
      kind: "bad", symbol: "✕", title: "Incomplete: no answers for now",
      text: `Nobody hosts ${blockList(gaps)} (${count(lacking)} of ${count(model.blocks)}). Answers wait until somebody does.`,
    };
  }
  if (thin.length) {
    return {
      kind: "warn", symbol: "▲", title: "Complete, but thin",
      text: thin.length === 1 && thin[0][1] - thin[0][0] === 1
        ? `${capital(blockList(thin))} has one host only: if it leaves, answers stop.`
        : `${capital(blockList(thin))} have one host each: if one of these leaves, answers stop.`,
    };
  }
  const fewest = Math.min(...model.replicas);
  const weakest = runs(model.replicas, (n) => n === fewest);
  return {
    kind: "good", symbol: "✓", title: "Healthy",
    text: weakest[0][1] - weakest[0][0] === model.blocks
      ? `Each of the ${count(model.blocks)} blocks is on ${plural(fewest, "peer")}: any of them may leave.`
      : `All ${count(model.blocks)} blocks are hosted. Fewest replicas: ${count(fewest)}, on ${blockList(weakest)}.`,
  };
}

export const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

const ADMISSIONS = { open: "open swarm", certificate: "members only", "allow-list": "listed members" };
export const admission = (word) => ADMISSIONS[word] ?? word;
