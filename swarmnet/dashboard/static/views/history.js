/** Charts of a model over a day or a month. */

import { h, segmented, setText } from "../dom.js";
import { number, seconds } from "../format.js";
import { chart } from "./charts.js";

const EVERY_MS = 30_000;
const MOST_POINTS = 160;

/** `show(manifest)` loads the history of a model, and loads it again every half a minute. */
export function history() {
  let manifest = null;
  let window_ = "24h";
  let asked = 0;
  const line = (title, column, format) => ({ columns: [column], chart: chart({ title, format, group: "history", series: [{ label: "", color: "--c1", shape: "area" }] }) });
  const quantiles = (title, p50, p95) => ({ columns: [p50, p95], chart: chart({ title, format: seconds, group: "history", series: [{ label: "median", color: "--c1", shape: "line" }, { label: "95 % within", color: "--c2", shape: "dashed" }] }) });
  const whole = (v) => (Number.isFinite(v) ? String(Math.round(v)) : "–");
  const charts = [
    { name: "tokens per second", ...line("Tokens per second that clients receive", "tokens_per_s", number) },
    { name: "peers", columns: ["peers", "weakest"], chart: chart({ title: "Peers, and hosts of the weakest block", format: whole, wholeNumbers: true, group: "history", series: [{ label: "peers", color: "--c1", shape: "line" }, { label: "hosts of the weakest block", color: "--c3", shape: "line" }] }) },
    { name: "the time to the first token", ...quantiles("Time to the first token", "first_token_p50_s", "first_token_p95_s") },
    { name: "the time for each token", ...quantiles("Time for each token", "token_p50_s", "token_p95_s") },
    { name: "failures of hosts", isEmpty: (data) => data.failures.every((n) => !n) && data.recoveries.every((n) => !n), columns: ["failures", "recoveries"], chart: chart({ title: "Failures of hosts, and recoveries", format: whole, wholeNumbers: true, group: "history", series: [{ label: "failures", color: "--c-bad", shape: "bars" }, { label: "sessions that went on", color: "--c1", shape: "bars", below: true }] }) },
  ];
  const status = h("p", { class: "quiet chart-note", role: "status" });

  async function load() {
    if (!manifest) return;
    const turn = (asked += 1);
    try {
      const answer = await fetch(`/api/v1/history?window=${window_}&model=${encodeURIComponent(manifest)}`);
      if (!answer.ok) throw new Error(String(answer.status));
      const data = await answer.json();
      if (turn !== asked) return; // the user has chosen another window or model
      const { at_s, ...columns } = downsampled(data);
      const folded = charts.filter((each) => {
        const nothing = each.isEmpty?.(columns) ?? false;
        return !each.chart.update(at_s, each.columns.map((name) => (nothing ? columns[name].map(() => null) : columns[name])));
      });
      setText(status, folded.length ? `Nothing measured in this time: ${folded.map(({ name }) => name).join(", ")}. A chart appears with its first measurement.` : "");
    } catch {
      if (turn === asked) setText(status, "The history could not be loaded. The next attempt is in half a minute.");
    }
  }

  setInterval(() => { if (!document.hidden) load(); }, EVERY_MS);
  return {
    node: h("div", {}, h("div", { class: "chart-grid" }, charts.map((each) => each.chart.node)), status),
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
