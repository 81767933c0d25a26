/** Formats numbers, times and names as plain text. */

const NOTHING = "–";
const THIN = "\u202f";

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** 3 significant digits, with SI prefix from 10 000 on: 0.42, 9.31, 41.2, 512, 18.4 k. */
export function number(value) {
  if (!isNumber(value)) return NOTHING;
  const size = Math.abs(value);
  if (size >= 10_000) {
    const power = Math.min(4, Math.floor(Math.log10(size) / 3));
    return `${digits(value / 1000 ** power)}${THIN}${["", "k", "M", "G", "T"][power]}`;
  }
  return digits(value);
}

function digits(value) {
  const size = Math.abs(value);
  if (Number.isInteger(value) || size >= 100) return String(Math.round(value));
  if (size >= 10) return value.toFixed(1);
  return value.toFixed(2);
}

/** A whole number with separated thousands: 12 480. */
export const count = (value) =>
  isNumber(value) ? String(Math.round(value)).replace(/\B(?=(\d{3})+$)/g, THIN) : NOTHING;

/** `n` with the singular or plural of a word: "1 peer", "3 peers". */
export const plural = (n, word, words = `${word}s`) => `${count(n)} ${n === 1 ? word : words}`;

/** A measured duration, as [digits, unit]: ["84", "ms"], ["1.24", "s"]. */
export function durationParts(seconds) {
  if (!isNumber(seconds)) return [NOTHING, ""];
  if (seconds === 0) return ["0", "s"];
  if (seconds < 0.001) return [String(Math.round(seconds * 1e6)), "µs"];
  if (seconds < 1) return [seconds < 0.01 ? (seconds * 1000).toFixed(1) : String(Math.round(seconds * 1000)), "ms"];
  if (seconds < 100) return [seconds.toFixed(seconds < 10 ? 2 : 1), "s"];
  return [String(Math.round(seconds / 60)), "min"];
}

export const seconds = (value) => durationParts(value).filter(Boolean).join(THIN);

/** A size in units of 1024 bytes: KiB, MiB … */
export function bytes(value) {
  if (!isNumber(value)) return NOTHING;
  let size = value;
  let unit = 0;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  while (Math.abs(size) >= 1000 && unit < units.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${digits(unit ? size : Math.round(size))}${THIN}${units[unit]}`;
}

export const percent = (share) => (isNumber(share) ? `${digits(Math.round(share * 1000) / 10)}${THIN}%` : NOTHING);

/** A duration in its two largest units: 40 s, 12 min, 3 h 20 min, 5 d 2 h. */
export function duration(value) {
  if (!isNumber(value)) return NOTHING;
  const s = Math.max(0, Math.round(value));
  if (s < 90) return `${s}${THIN}s`;
  const min = Math.round(s / 60);
  if (min < 60) return `${min}${THIN}min`;
  const h = Math.floor(min / 60);
  if (h < 24) return join(h, "h", min % 60, "min");
  return join(Math.floor(h / 24), "d", h % 24, "h");
}

const join = (large, largeUnit, small, smallUnit) =>
  `${large}${THIN}${largeUnit}${small ? ` ${small}${THIN}${smallUnit}` : ""}`;

/** An age: "now", "40 s ago". */
export const ago = (seconds_) => (isNumber(seconds_) ? (seconds_ < 5 ? "now" : `${duration(seconds_)} ago`) : NOTHING);

/** Local date and time, for tooltips. */
export const dateTime = (unix_s) =>
  isNumber(unix_s) ? new Date(unix_s * 1000).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "medium" }) : "";

/** Local hour and minute. */
export const clock = (unix_s) =>
  new Date(unix_s * 1000).toLocaleTimeString(undefined, { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });

export const day = (unix_s) =>
  new Date(unix_s * 1000).toLocaleDateString(undefined, { day: "numeric", month: "short" });

/** The last six characters of an id; the first ones are the same for all peers. */
export const shortId = (id) => `…${id.slice(-6)}`;

/** A span as commands take it: "0:10" is blocks 0 to 9. */
export const span = ([start, end]) => `${start}:${end}`;

/** The last part of a model name, which is often a path or org/name. */
export const modelName = (name) => name.split("/").filter(Boolean).pop() ?? name;
