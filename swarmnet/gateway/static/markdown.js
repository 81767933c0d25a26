/**
 * Draws the Markdown of an answer as DOM nodes, also while it grows.
 *
 * The text comes from a model. Every piece of it becomes a text node, links lead to http(s) only, and nothing here parses HTML.
 * The time is linear in the text: each search for the end of a mark is made once.
 */

import { copyButton, h } from "./dom.js";

const MAX_DEPTH = 8; // quotes and lists within each other; deeper ones are text
const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*))?$/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?:[ \t]+|$)/;
const QUOTE = /^ {0,3}> ?/;
const DELIMITERS = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const MARKS = { "**": "strong", __: "strong", "~~": "del", "*": "em", _: "em" };

/** Shows control characters, such as ESC, as symbols: they would be invisible. */
export const visible = (text) =>
  text.replace(/\r\n?/g, "\n").replace(/[\0-\x08\x0b-\x1f]/g, (char) => String.fromCharCode(0x2400 + char.charCodeAt(0))).replace(/\x7f/g, "\u2421")
    .replace(/[\u202a-\u202e\u2066-\u2069]/g, "\ufffd"); // they would reorder the text around them

/** A node whose Markdown can be set again and again. Blocks that stay the same keep their nodes. */
export function markdownNode() {
  const node = h("div", { class: "markdown" });
  let drawn = [];
  node.setMarkdown = (text) => {
    const next = blocks(visible(text).split("\n"));
    const keys = next.map(({ kind, lines, info }) => `${kind} ${info ?? ""}\n${lines.join("\n")}`);
    let same = 0;
    while (same < keys.length && keys[same] === drawn[same]) same += 1;
    const code = node.children[same]?.querySelector?.("code");
    if (same === keys.length - 1 && next[same].kind === "code" && drawn[same]?.startsWith("code ") && code) {
      code.firstChild ? code.firstChild.data = next[same].lines.join("\n") : code.append(next[same].lines.join("\n"));
    } else {
      while (node.children.length > same) node.lastChild.remove();
      node.append(...next.slice(same).map((block) => draw(block, 0)));
    }
    drawn = keys;
  };
  return node;
}

/** The blocks of some lines: {kind, lines, …}. */
function blocks(lines) {
  const found = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    const fence = FENCE.exec(line);
    const heading = HEADING.exec(line);
    if (!line.trim()) {
      at += 1;
    } else if (fence) {
      const end = new RegExp(`^ {0,3}${fence[1][0]}{${fence[1].length},}[ \\t]*$`);
      let stop = at + 1;
      while (stop < lines.length && !end.test(lines[stop])) stop += 1;
      found.push({ kind: "code", lines: lines.slice(at + 1, stop), info: fence[2] });
      at = stop + 1;
    } else if (heading) {
      found.push({ kind: "heading", lines: [(heading[2] ?? "").replace(/[ \t]+#+[ \t]*$/, "")], info: heading[1].length });
      at += 1;
    } else if (RULE.test(line)) {
      found.push({ kind: "rule", lines: [] });
      at += 1;
    } else if (QUOTE.test(line)) {
      const stop = endOf(lines, at, (each) => QUOTE.test(each));
      found.push({ kind: "quote", lines: lines.slice(at, stop).map((each) => each.replace(QUOTE, "")) });
      at = stop;
    } else if (ITEM.test(line)) {
      const stop = endOfList(lines, at);
      found.push({ kind: "list", lines: lines.slice(at, stop) });
      at = stop;
    } else if (line.includes("|") && DELIMITERS.test(lines[at + 1] ?? "") && cells(line).length === cells(lines[at + 1]).length) {
      const stop = endOf(lines, at + 2, (each) => each.includes("|"));
      found.push({ kind: "table", lines: lines.slice(at, stop) });
      at = stop;
    } else {
      const stop = endOf(lines, at + 1, (each) => each.trim() && !FENCE.test(each) && !HEADING.test(each) && !RULE.test(each) && !QUOTE.test(each) && !/^ {0,3}(?:[-*+]|1[.)])[ \t]+\S/.test(each));
      found.push({ kind: "paragraph", lines: lines.slice(at, stop) });
      at = stop;
    }
  }
  return found;
}

function endOf(lines, at, holds) {
  while (at < lines.length && holds(lines[at])) at += 1;
  return at;
}

const indent = (line) => line.length - line.trimStart().length;
const isOrdered = (line) => /\d/.test(ITEM.exec(line)?.[2] ?? "");

function endOfList(lines, from) {
  const ordered = isOrdered(lines[from]);
  const base = indent(lines[from]);
  let at = from + 1;
  while (at < lines.length) {
    const line = lines[at];
    const goesOn = indent(line) < base + 2 && ITEM.test(line) ? isOrdered(line) === ordered && !RULE.test(line) : indent(line) >= base + 2;
    if (line.trim() ? !goesOn && !(lines[at - 1].trim() && !FENCE.test(line) && !HEADING.test(line) && !RULE.test(line) && !QUOTE.test(line) && !ITEM.test(line)) : !following(lines, at, ordered)) break;
    at += 1;
  }
  return at;
}

/** Tells whether a list goes on after a blank line. */
function following(lines, at, ordered) {
  const line = lines[at + 1];
  return Boolean(line?.trim()) && (ITEM.test(line) ? isOrdered(line) === ordered : indent(line) >= 2);
}

const cells = (line) => line.trim().replace(/^\|/, "").replace(/\|$/, "").split("|").map((cell) => cell.trim());

function draw(block, depth) {
  const text = block.lines.join("\n");
  if (depth > MAX_DEPTH) return h("p", {}, text);
  switch (block.kind) {
    case "code": return codeNode(text, block.info);
    case "heading": return h(`h${Math.min(6, block.info + 2)}`, {}, inline(text));
    case "rule": return h("hr", {});
    case "quote": return h("blockquote", {}, blocks(block.lines).map((each) => draw(each, depth + 1)));
    case "list": return listNode(block.lines, depth);
    case "table": return tableNode(block.lines);
    default: return h("p", {}, inline(block.lines.map((line) => line.trim()).join("\n")));
  }
}

function codeNode(text, language) {
  const code = h("code", {}, text);
  const name = language || "text";
  return h("figure", { class: "code" },
    h("figcaption", {}, h("span", {}, name), copyButton(`Copy the ${name} code`, code)),
    h("pre", { tabindex: "0", role: "region", "aria-label": `${name} code` }, code));
}

function listNode(lines, depth) {
  const items = [];
  for (const line of lines) {
    const item = indent(line) < indent(lines[0]) + 2 ? ITEM.exec(line) : null;
    if (item) items.push({ lines: [line.slice(item[0].length)], width: Math.min(item[0].length, 4) });
    else {
      const last = items.at(-1);
      last.lines.push(line.slice(Math.min(indent(line), last.width)));
    }
  }
  const start = Number.parseInt(lines[0], 10);
  const tight = !lines.some((line) => !line.trim());
  const nodes = items.map((item) => h("li", {}, blocks(item.lines).map((each) =>
    tight && each.kind === "paragraph" ? inline(each.lines.map((line) => line.trim()).join("\n")) : draw(each, depth + 1))));
  return isOrdered(lines[0]) ? h("ol", { start: start === 1 ? null : start }, nodes) : h("ul", {}, nodes);
}

function tableNode(lines) {
  const [head, aligned, ...rows] = lines.map(cells);
  const kinds = aligned.map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "end") : null));
  const row = (tag, texts) => h("tr", {}, head.map((_, at) => h(tag, { "data-align": kinds[at] }, inline(texts[at] ?? ""))));
  return h("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" },
    h("table", {}, h("thead", {}, row("th", head)), h("tbody", {}, rows.map((texts) => row("td", texts)))));
}

/** Nodes of the text of one block. */
function inline(text, depth = 0) {
  const nodes = [];
  const absent = new Set(); // marks without an end in the rest of the text
  let plain = "";
  let at = 0;
  const flush = () => { if (plain) nodes.push(plain); plain = ""; };
  const find = (mark, from) => {
    if (absent.has(mark)) return -1;
    const end = text.indexOf(mark, from);
    if (end < 0) absent.add(mark);
    return end;
  };
  while (at < text.length) {
    const char = text[at];
    if (char === "\\" && /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "")) {
      plain += text[at + 1];
      at += 2;
    } else if (char === "\n") {
      flush();
      nodes.push(h("br", {}));
      at += 1;
    } else if (char === "`") {
      const ticks = /^`+/.exec(text.slice(at, at + 16))[0];
      const end = find(ticks, at + ticks.length);
      if (end < 0) { plain += ticks; at += ticks.length; continue; }
      flush();
      nodes.push(h("code", {}, text.slice(at + ticks.length, end).replace(/^ (.*) $/, "$1")));
      at = end + ticks.length;
    } else if (char === "*" || char === "_" || (char === "~" && text[at + 1] === "~")) {
      const mark = text[at + 1] === char ? char + char : char;
      const opens = /\S/.test(text[at + mark.length] ?? "") && !(char === "_" && /\w/.test(text[at - 1] ?? ""));
      let end = opens && depth < MAX_DEPTH ? find(mark, at + mark.length + 1) : -1;
      for (let skips = 0; mark.length === 1 && end > 0 && text[end + 1] === char && skips < MAX_DEPTH; skips += 1) end = find(mark, end + 2); // ends of strong text
      if (end < 0 || /\s/.test(text[end - 1]) || (char === "_" && /\w/.test(text[end + mark.length] ?? ""))) { plain += mark; at += mark.length; continue; }
      flush();
      nodes.push(h(MARKS[mark], {}, inline(text.slice(at + mark.length, end), depth + 1)));
      at = end + mark.length;
    } else if (char === "[" && depth < MAX_DEPTH) {
      const middle = find("](", at);
      const end = middle < 0 || middle - at > 1000 ? -1 : find(")", middle);
      const link = end < 0 || end - middle > 2000 ? null : address(text.slice(middle + 2, end));
      if (!link) { plain += char; at += 1; continue; }
      flush();
      nodes.push(linkNode(link, inline(text.slice(at + 1, middle), MAX_DEPTH)));
      at = end + 1;
    } else if (char === "h" && /^https?:\/\//.test(text.slice(at, at + 8)) && !/\w/.test(text[at - 1] ?? "")) {
      const url = /^[^\s<>"`*]{1,2000}/.exec(text.slice(at, at + 2000))[0].replace(/[.,;:!?)\]]+$/, "");
      const link = address(url);
      if (!link) { plain += char; at += 1; continue; }
      flush();
      nodes.push(linkNode(link, url));
      at += url.length;
    } else {
      plain += char;
      at += 1;
    }
  }
  flush();
  return nodes;
}

/** A web address, or null for anything else, such as javascript:. */
function address(text) {
  const [url] = text.trim().split(/\s/);
  if (!/^https?:\/\//i.test(url)) return null;
  try {
    return new URL(url).href;
  } catch {
    return null;
  }
}

const linkNode = (url, content) => h("a", { href: url, target: "_blank", rel: "noopener noreferrer" }, content);
