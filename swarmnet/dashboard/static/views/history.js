/** Charts of a model over a day or a month. */

import { h, segmented, setText } from "../dom.js";
import { number, seconds } from "../format.js";
import { chart } from "./charts.js";

const EVERY_MS = 60_000;
const MOST_POINTS = 160;

/** `show(manifest)` loads the history of a model, and loads it again every minute. */
export function history() {
  let manifest = null;
  let window_ = "24h";
  let asked = 0;
  const line = (title, column, format) => ({ columns: [column], chart: chart({ title, format, group: "history", series: [{ label: "", color: "--c1", shape: "area" }] }) });
  const quantiles = (title, p50, p95) => ({ columns: [p50, p95], chart: chart({ title, format: seconds, group: "history", series: [{ label: "p50", color: "--c1", shape: "line" }, { label: "p95", color: "--c2", shape: "dashed" }] }) });
  const whole = (v) => (Number.isFinite(v) ? String(Math.round(v)) : "–");
  const charts = [
    line("Tokens per second", "tokens_per_s", number),
    { columns: ["peers", "weakest"], chart: chart({ title: "Peers, and replicas of the weakest block", format: whole, wholeNumbers: true, group: "history", series: [{ label: "peers", color: "--c1", shape: "line" }, { label: "weakest", color: "--c3", shape: "line" }] }) },
    quantiles("Time to the first token", "first_token_p50_s", "first_token_p95_s"),
    quantiles("Time for each token", "token_p50_s", "token_p95_s"),
    { columns: ["failures", "recoveries"], chart: chart({ title: "Failures of hosts, and recoveries", format: whole, wholeNumbers: true, group: "history", series: [{ label: "failures", color: "--c-bad", shape: "bars" }, { label: "recovered", color: "--c1", shape: "bars", below: true }] }) },
  ];
  const status = h("p", { class: "quiet", role: "status" });

  async function load() {
    if (!manifest) return;
    const turn = (asked += 1);
    try {
      const answer = await fetch(`/api/v1/history?window=${window_}&model=${encodeURIComponent(manifest)}`);
      if (!answer.ok) throw new Error(String(answer.status));
      const data = await answer.json();
      if (turn !== asked) return; // the user has chosen another window or model
      const { at_s, ...columns } = downsampled(data);
      for (const each of charts) each.chart.update(at_s, each.columns.map((name) => columns[name]));
      setText(status, "");
    } catch {
      if (turn === asked) setText(status, "The history could not be loaded. The next attempt is in a minute.");
    }
  }

  setInterval(() => { if (!document.hidden) load(); }, EVERY_MS);
  return {
    node: h("div", {}, status, h("div", { class: "chart-grid" }, charts.map((each) => each.chart.node))),
    controls: segmented("Time shown", [["24h", "24 h"], ["30d", "30 d"]], window_, (next) => { window_ = next; load(); }),
    show(next) {
      if (next === manifest) return;
      manifest = next;
      load();
    },
  };
}

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
const total = (values) => values.reduce((sum, value) => sum + value, 0);
const MERGE = { weakest: (values) => Math.min(...values), failures: total, recoveries: total };

/** At most `most` points: neighbours are merged to their mean, counts to their sum, `weakest` to its minimum. */
export function downsampled(data, most = MOST_POINTS) {
  const step = Math.ceil(data.at_s.length / most);
  if (step < 2) return data;
  const starts = Array.from({ length: Math.ceil(data.at_s.length / step) }, (_, i) => i * step);
  return Object.fromEntries(Object.entries(data).map(([name, column]) => [name, starts.map((at) => {
    const values = column.slice(at, at + step).filter((value) => value !== null);
    return values.length ? (MERGE[name] ?? mean)(values) : null;
  })]));
}
