/** Line and bar charts (uPlot) in the page's colours, with the newest values or those under the pointer as text. */

import { h, setAttribute, setStyle, setText } from "../dom.js";
import { clock, day, number } from "../format.js";

const HEIGHT = 148;

/**
 * A chart. `series` are {label, color: CSS variable, shape: "line" | "sparse" (drawn over gaps) | "dashed" | "area" | "bars", below: bool}; `format` turns a
 * value into text. The horizontal axis is Unix time, or with `alongX: {label, format, tick}` another quantity.
 * The vertical axis begins at 0 unless `fromZero` is false. Charts of one `group` share their cursor.
 * `update(x, columns)` draws, and hides the chart if nothing was measured. A column has null where nothing was measured.
 */
export function chart({ title, series, format, alongX = null, group = null, height = HEIGHT, wholeNumbers = false, fromZero = true }) {
  const when = h("span", { class: "quiet" });
  const values = series.map(() => h("span", {}));
  const readout = h("span", { class: "readout" }, when, series.map((one, i) => h("span", {}, one.label ? [key(one), `${one.label} `] : null, values[i])));
  const plot = h("div", { class: "plot", "aria-hidden": "true" });
  const node = h("figure", { class: "chart", hidden: true }, h("figcaption", {}, h("span", { class: "chart-title" }, title), readout), plot);
  let drawn = null;
  let data = null;
  let width = 0;

  const color = (name) => getComputedStyle(node).getPropertyValue(name).trim();

  function options() {
    const grid = { stroke: color("--line"), width: 1 };
    const ink = color("--ink-2");
    const axis = { stroke: ink, font: "11px Inter, system-ui, sans-serif", ticks: { show: false } };
    return {
      width, height, padding: [8, 10, 0, 0], legend: { show: false },
      cursor: { y: false, points: { size: 6 }, drag: { x: false, y: false }, ...(group ? { sync: { key: group } } : {}) },
      scales: { x: { time: false }, y: { range: fromZero ? rangeFromZero : rangeAround } },
      axes: [
        { ...axis, grid: { show: false }, size: 26, space: 70, gap: 4, ...(alongX ? {} : { incrs: TIME_STEPS, splits: timeSplits }), values: (_, at) => once(at.map((v, i) => (alongX ? alongX.tick(v) : hour(at, i)))) },
        { ...axis, grid, size: 52, gap: 6, space: 30, ...(wholeNumbers ? { incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000] } : {}), values: (_, at) => at.map((v) => format(Math.abs(v))) },
      ],
      series: [{}, ...series.map((one) => lineOf(one, color))],
      bands: series.some(({ shape }) => shape === "dashed") ? [{ series: [2, 1], fill: color("--band") }] : [],
      hooks: { setCursor: [(u) => said(u.cursor.idx ?? null)] },
    };
  }

  function said(at) {
    const shown = at ?? lastMeasured(data);
    readout.hidden = shown === null;
    if (shown === null) return;
    setText(when, alongX ? `${alongX.label} ${alongX.format(data[0][shown])}` : short(data[0][shown]));
    values.forEach((node, i) => setText(node, format(value(data[i + 1][at ?? lastMeasured([data[0], data[i + 1]]) ?? shown], series[i]))));
  }

  function draw() {
    node.hidden = data === null || lastMeasured(data) === null;
    if (node.hidden || !width) return;
    drawn?.destroy();
    drawn = new uPlot(options(), data, plot);
    said(null);
  }

  new ResizeObserver(([entry]) => {
    const next = Math.floor(entry.contentRect.width);
    if (next === width) return;
    width = next;
    if (drawn) drawn.setSize({ width, height });
    else draw();
  }).observe(node);
  document.addEventListener("themechange", draw);

  return {
    node,
    update(x, columns) {
      data = [x, ...columns.map((column, i) => (series[i].below ? column.map((v) => (v === null ? null : -v)) : column))];
      setAttribute(node, "aria-label", spoken(title, series, columns, format));
      if (drawn && lastMeasured(data) !== null) {
        drawn.setData(data);
        node.hidden = false;
        said(null);
      } else draw();
      return !node.hidden;
    },
  };
}

const value = (v, { below }) => (v === null || v === undefined ? NaN : below ? -v : v);

/** Labels of an axis without repetitions: ticks may lie closer than the digits that labels show. */
const once = (labels) => labels.map((label, i) => (label === labels[i - 1] ? "" : label));

/** The mark of a series in the legend: its colour and shape. */
function key({ color, shape }) {
  const mark = h("i", { class: `key ${shape}`, "aria-hidden": "true" });
  setStyle(mark, "--key", `var(${color})`);
  return mark;
}

/** The places of values without a neighbour, which make no visible line; a sparse line reaches over gaps. */
function alone(column, sparse) {
  const measured = (at) => column[at] !== null && column[at] !== undefined;
  const places = [...column.keys()].filter(measured);
  return sparse ? (places.length < 2 ? places : []) : places.filter((at) => !measured(at - 1) && !measured(at + 1));
}

/** A little more than the values, for quantities whose distance from 0 says little. */
const rangeAround = (_, low, high) => {
  const margin = (high - low) * 0.08 || Math.abs(high) * 0.05 || 1;
  return [low - margin, high + margin];
};

const rangeFromZero = (_, low, high) => {
  const top = high > 0 ? high * 1.12 : low < 0 ? 0 : 1;
  return [low < 0 ? low * 1.12 : 0, top];
};

function lineOf({ shape, color: name }, color) {
  const stroke = color(name);
  if (shape === "bars") return { stroke, fill: stroke, width: 0, points: { show: false }, paths: uPlot.paths.bars({ size: [0.7, 12], align: 0 }) };
  const points = { show: false, filter: (u, i) => alone(u.data[i], shape === "sparse"), size: 5, fill: stroke };
  return { stroke, width: 1.5, points, spanGaps: shape === "sparse", dash: shape === "dashed" ? [4, 3] : undefined, fill: shape === "area" ? color("--area") : undefined };
}

function lastMeasured(data) {
  if (!data) return null;
  for (let at = data[0].length - 1; at >= 0; at -= 1) if (data.slice(1).some((column) => column[at] !== null && column[at] !== undefined)) return at;
  return null;
}

const HOUR = 3600;
const TIME_STEPS = [60, 300, 900, 1800, HOUR, 2 * HOUR, 3 * HOUR, 4 * HOUR, 6 * HOUR, 12 * HOUR, 24 * HOUR, 48 * HOUR, 120 * HOUR, 240 * HOUR];

/** Ticks at full hours and midnights in local time. */
function timeSplits(_, _axis, low, high, step) {
  const offset = new Date(high * 1000).getTimezoneOffset() * 60;
  const first = Math.ceil((low - offset) / step) * step + offset;
  return Array.from({ length: Math.max(0, Math.floor((high - first) / step) + 1) }, (_unused, i) => first + i * step);
}

const hour = (ticks, i) => (ticks.length > 1 && ticks[1] - ticks[0] >= 24 * HOUR ? day(ticks[i]) : clock(ticks[i]));
const short = (at_s) => `${day(at_s)} ${clock(at_s)}`;

function spoken(title, series, columns, format) {
  const parts = series.map(({ label }, i) => {
    const measured = columns[i].filter((v) => v !== null);
    if (!measured.length) return `${label || "value"} not measured`;
    return `${label ? `${label} ` : ""}latest ${format(measured.at(-1))}, lowest ${format(Math.min(...measured))}, highest ${format(Math.max(...measured))}`;
  });
  return `${title}: ${parts.join("; ")}`;
}

export const AFTER_TOKENS = { label: "after", format: (v) => `${number(v)} tokens`, tick: number };

/** A job's loss. `update(x, [loss, val_loss])`. */
export const lossChart = (height, alongX = AFTER_TOKENS) => chart({
  title: "Loss, mean of the workers", format: number, height, alongX, fromZero: false,
  series: [{ label: "training", color: "--c1", shape: "line" }, { label: "held out", color: "--c3", shape: "sparse" }],
});
