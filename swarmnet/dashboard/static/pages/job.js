/** The page of one training job. */

import { h, reconcile, panel, segmented, setText } from "../dom.js";
import { bytes, clock, count, day, number, percent, plural, shortId, span } from "../format.js";
import { AFTER_TOKENS, lossChart } from "../views/charts.js";
import { fillShare, shareNode } from "../views/lists.js";
import { jobState } from "../words.js";
import { factList, missing, poll } from "./detail.js";

const when = (at_s) => `${day(at_s)} ${clock(at_s)}`;
const AXES = {
  tokens: AFTER_TOKENS,
  bytes: { label: "after", format: bytes, tick: bytes },
  at_s: { label: "", format: when, tick: when },
};

const STAGE_COLUMNS = {
  Stage: "A part of the model, with its blocks. Stage 0 also has the embeddings and the output head.",
  Workers: "A stage with one worker loses its last updates with that worker.",
  Computing: "Share of the time in recent rounds. In the rest, the stage waits, mostly for the stage that computes most.",
  "Tokens/s": "Tokens of recent rounds, of all workers of the stage together.",
  "Bytes/token": "Activations to the next stage and gradients from it. The last stage is followed by stage 0.",
};

/** {node, title, update(state)}; the curve and the rounds come from `/api/v1/jobs/ID`. */
export function jobPage(id) {
  const title = h("h1", {}, shortId(id));
  const state = h("span", { class: "chip" });
  const facts = factList();
  const curves = Object.fromEntries(Object.entries(AXES).map(([name, alongX]) => [name, lossChart(300, alongX)]));
  const by = segmented("Loss against", [["tokens", "Tokens"], ["bytes", "Bytes"], ["at_s", "Time"]], "tokens", choose);
  const none = h("p", { class: "quiet" }, "No round is complete yet. The curve begins with the first.");
  const shares = h("ol", { class: "shares" });
  const rounds = h("tbody", {});
  const stages = h("tbody", {});
  const found = h("div", {},
    h("div", { class: "detail-head" }, title, state), h("p", { class: "full-id" }, id),
    h("div", { class: "columns" },
      h("div", { class: "side" }, panel("Stages", { id: "stages" }, h("div", { class: "table-scroll", tabindex: 0, role: "region", "aria-label": "Table of stages" },
        h("table", {}, h("thead", {}, h("tr", {}, Object.entries(STAGE_COLUMNS).map(([name, title]) => h("th", { scope: "col", title }, name)))), stages))),
        panel("Loss", { id: "loss", aside: [by] }, Object.values(curves).map((each) => h("div", {}, each.node)), none),
        panel("Latest rounds", { id: "rounds" }, h("div", { class: "table-scroll", tabindex: 0, role: "region", "aria-label": "Table of rounds" },
          h("table", {}, h("thead", {}, h("tr", {}, ["Round", "Loss", "Workers", "When"].map((name) => h("th", { scope: "col" }, name)))), rounds)))),
      h("div", { class: "side" }, panel("Now", { id: "now" }, facts.node), panel("Shares of the rounds trained", { id: "contributors" }, shares))));
  const absent = missing("This job is not known", "No worker of this swarm announces it, or its id is wrong.");
  const node = h("div", { class: "detail" }, h("p", { class: "crumb" }, h("a", { href: "/#jobs-title" }, "← All jobs")), found, absent);

  let peers = {};

  function choose(name) {
    for (const [each, { node: figure }] of Object.entries(curves)) figure.parentElement.hidden = each !== name;
  }
  choose("tokens");

  const more = poll(`/api/v1/jobs/${encodeURIComponent(id)}`, (data) => {
    show(data);
    const drawn = Object.entries(curves).map(([name, { update }]) => update(data.curve[name], [data.curve.loss, data.curve.val_loss]));
    none.hidden = drawn[0];
    reconcile(rounds, data.last_rounds, (each) => each.round, () => h("tr", {}, h("th", { scope: "row" }), h("td"), h("td"), h("td")), (row, each) => {
      [count(each.round), number(each.loss), count(each.workers), when(each.at_s)].forEach((text, at) => setText(row.children[at], text));
    });
    found.querySelector("#rounds").hidden = data.last_rounds.length === 0;
  }, (is) => { found.hidden = !is; absent.hidden = is; });

  function show(job) {
    setText(title, job.name || shortId(id));
    setText(state, jobState(job));
    facts.update([
      ["Method", job.method], ["Round", `${count(job.round)} of ${count(job.rounds)}`], ["Loss", number(job.loss)], ["Held-out loss", number(job.val_loss)],
      ["Tokens of all workers", number(job.tokens)], ["Sent by all workers", bytes(job.bytes_sent)], ["Workers now", count(job.workers)],
      ...(job.waited_for ? [["Waited for", `${peers[job.waited_for.peer_id]?.name || shortId(job.waited_for.peer_id)}, ${count(Math.round(job.waited_for.seconds))} s`, `The last round waited for its ${job.waited_for.why}.`]] : []),
      ...(job.ended_s && job.round ? [["Last worker left", when(job.ended_s), "The job stays here for 30 days after that."]] : []),
    ]);
    found.querySelector("#stages").hidden = !job.stages;
    reconcile(stages, job.stages ?? [], (each) => each.stage, () => h("tr", {}, h("th", { scope: "row" }), Object.keys(STAGE_COLUMNS).slice(1).map(() => h("td"))), (row, each) => {
      const [name, workers, ...rates] = row.children;
      setText(name, `${each.stage}${each.blocks && each.blocks[0] < each.blocks[1] ? ` (${span(each.blocks)})` : ""}`);
      const links = each.workers.map((peer) => ({ href: `/peers/${encodeURIComponent(peer)}`, text: peers[peer]?.name || shortId(peer) }));
      reconcile(workers, [...links, ...(each.missing ? [{ text: `${plural(each.missing, "replica")} missing` }] : [])], (part) => part.href ?? "missing",
        (part) => (part.href ? h("a", { class: "stage-worker", href: part.href }) : h("span", { class: "stage-missing" })), (node, part) => setText(node, part.text));
      const waits = each.waits_for === null ? "" : `, waits for ${each.waits_for}`;
      [`${percent(each.occupancy)}${waits}`, number(each.tokens_per_s), bytes(each.bytes_per_token)].forEach((text, at) => setText(rates[at], text));
    });
    const ranked = [...job.contributors].sort((a, b) => b.share - a.share);
    found.querySelector("#contributors").hidden = ranked.length === 0;
    reconcile(shares, ranked, (each) => each.peer_id, shareNode, (row, each) => fillShare(row, each.peer_id, peers[each.peer_id]?.name ?? null, each.share, percent(each.share), ""));
  }

  return {
    node,
    title: () => title.textContent,
    update(all) {
      peers = all.peers;
      if (all.jobs[id]) show(all.jobs[id]);
      more.start();
    },
  };
}
