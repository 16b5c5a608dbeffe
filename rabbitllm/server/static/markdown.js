// The little of Markdown that answers use, as DOM nodes. A model's text only ever becomes text nodes, never HTML, and
// addresses of http(s) become links; pictures are links too, so that nothing is loaded unless the user follows one.
// parse(text) -> blocks, plain data; node(block) -> an element; update(parent, text) changes only what is new.

import { highlight } from "./highlight.js";
import { maths } from "./maths.js";

const FENCE = /^(\s*)(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}(?:(?:- *){3,}|(?:\* *){3,}|(?:_ *){3,})$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(?:\s+(.*))?$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const FORMULA = /^\s*(\$\$|\\\[)/;
const FORMULA_ENDS = { $$: "$$", "\\[": "\\]" };
const FORMULA_LINES = 60;
const DELIMITERS = /^\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;
// spans are bounded, so that a long text of opening marks takes no time
const ADDRESS = String.raw`https?:\/\/(?=[\w\x80-\uffff])(?:[^\s<>"*()\x60\u3000-\u303f\uff00-\uffef]|\([^\s<>"*()\x60]{0,200}\)){1,2000}`;
const SPAN = new RegExp([
  String.raw`(?<!\x60)(\x60{1,9})(?!\x60)([^]{1,2000}?)(?<!\x60)\1(?!\x60)`,
  String.raw`\\\(([^]{1,500}?)\\\)|(?<![\\$\w])\$(?=[^\s$])([^$\n\x60]{1,500})(?<=[^\s\\])\$(?![\d$])`,
  String.raw`\\\[([^]{1,1000}?)\\\]|(?<!\\)\$\$([^$]{1,1000})\$\$`,
  String.raw`\\([\\$*_\x60~#|])`,
  String.raw`!?\[([^[\]]{0,500})\]\(\s?(${ADDRESS})(?:\s"[^"]{0,500}")?\s?\)`,
  String.raw`\*\*(?=\S)([^]{1,1000}?)(?<=\S)\*\*`,
  String.raw`\*(?=[^\s*])([^*]{1,1000}?)(?<=\S)\*(?!\*)`,
  String.raw`~~(?=[^\s~])([^]{1,1000}?)(?<=\S)~~`,
  String.raw`<(${ADDRESS})>`,
  String.raw`(?<!\w)(${ADDRESS})(?<![.,;:!?'\]}~])`,
].join("|"), "g");
const TASK = /^\[([ xX])\]\s+(?=\S)/;
const DEEPEST = 8;

export function parse(text, depth = 0) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n");
  const blocks = [];
  let at = 0;
  let found;
  while (at < lines.length) {
    const line = lines[at];
    if (!line.trim()) at++;
    else if ((found = FENCE.exec(line))) {
      const [, indent, marks, info] = found;
      const end = new RegExp(`^\\s*${marks[0]}{${marks.length},}\\s*$`);
      const code = [];
      for (at++; at < lines.length && !end.test(lines[at]); at++) code.push(without(lines[at], indent.length));
      at++;
      blocks.push({ kind: "code", language: info.trim().split(/\s/)[0], text: code.join("\n") });
    } else if ((found = formula(lines, at))) {
      blocks.push({ kind: "maths", text: found.text });
      at = found.after;
    } else if ((found = HEADING.exec(line))) {
      blocks.push({ kind: "heading", level: found[1].length, spans: spans(found[2].replace(/\s#+\s*$/, "")) });
      at++;
    } else if (RULE.test(line)) {
      blocks.push({ kind: "rule" });
      at++;
    } else if (depth < DEEPEST && QUOTE.test(line)) {
      const inner = [];
      for (; at < lines.length && (found = QUOTE.exec(lines[at])); at++) inner.push(found[1]);
      blocks.push({ kind: "quote", blocks: parse(inner.join("\n"), depth + 1) });
    } else if (depth < DEEPEST && (found = ITEM.exec(line))) {
      const list = { kind: "list", ordered: /\d/.test(found[2]), start: parseInt(found[2], 10) || 1, items: [] };
      at = items(lines, at, list, depth);
      blocks.push(list);
    } else if (line.includes("|") && at + 1 < lines.length && lines[at + 1].includes("|") && DELIMITERS.test(lines[at + 1])) {
      const align = columns(lines[at + 1]).map((mark) => (mark.endsWith(":") ? (mark.startsWith(":") ? "center" : "right") : mark[0] === ":" ? "left" : ""));
      const rows = [cells(line)];
      for (at += 2; at < lines.length && lines[at].includes("|"); at++) rows.push(cells(lines[at]));
      blocks.push({ kind: "table", align, rows });
    } else {
      const inner = [line];
      for (at++; at < lines.length && lines[at].trim() && !begins(lines[at]); at++) inner.push(lines[at]);
      blocks.push({ kind: "paragraph", spans: spans(inner.join("\n").trim()) });
    }
  }
  return blocks;
}

/** A formula that stands alone, perhaps over several lines; null before its end has come. */
function formula(lines, at) {
  const mark = FORMULA.exec(lines[at])?.[1];
  if (!mark) return null;
  const end = FORMULA_ENDS[mark];
  let text = lines[at].trimStart().slice(mark.length);
  for (let last = at; ; text += `\n${lines[last]}`) {
    const closes = text.indexOf(end, Math.max(0, text.length - (lines[last].length + 2)));
    if (closes >= 0) {
      const alone = !text.slice(closes + end.length).replace(/[.,;]/, "").trim() && text.slice(0, closes).trim();
      return alone ? { text: alone + text.slice(closes + end.length).trim(), after: last + 1 } : null;
    }
    if (++last >= lines.length || last - at > FORMULA_LINES || !lines[last].trim()) return null;
  }
}

const begins = (line) => [FORMULA, FENCE, HEADING, RULE, ITEM, QUOTE].some((kind) => kind.test(line));
const without = (line, count) => line.slice(Math.min(count, line.length - line.trimStart().length));
const columns = (line) => line.trim().replace(/^\||(?<!\\)\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
const cells = (line) => columns(line).map((cell) => spans(cell));

/** Reads the items of a list; what is indented below an item belongs to it. Returns the line after the list. */
function items(lines, at, list, depth) {
  const indent = ITEM.exec(lines[at])[1].length;
  while (at < lines.length) {
    const found = ITEM.exec(lines[at]);
    if (!found || found[1].length !== indent || /\d/.test(found[2]) !== list.ordered || RULE.test(lines[at])) break;
    const text = found[3] ?? "";
    const task = TASK.exec(text);
    const inner = [task ? text.slice(task[0].length) : text];
    for (at++; at < lines.length; at++) {
      const line = lines[at];
      const deeper = line.length - line.trimStart().length > indent;
      const next = lines[at + 1] ?? "";
      const goesOn = line.trim() ? deeper || !(begins(line) || !lines[at - 1].trim()) : /^\s/.test(next) && next.trim();
      if (!goesOn) break;
      inner.push(without(line, indent + found[2].length + 1));
    }
    const blocks = parse(inner.join("\n"), depth + 1);
    if (task) blocks.unshift({ kind: "task", done: task[1] !== " " });
    list.items.push(blocks);
    while (at < lines.length && !lines[at].trim() && ITEM.test(lines[at + 1] ?? "")) at++;
  }
  return at;
}

/** Only addresses of the web, and none that shows another host before an "@". */
function isSafe(href) {
  try {
    const { protocol, username, password } = new URL(href);
    return /^https?:$/.test(protocol) && !username && !password;
  } catch {
    return false;
  }
}

function spans(text, linked = false) {
  const found = [];
  let from = 0;
  for (const match of text.matchAll(SPAN)) {
    const [whole, , code, inParens, inDollars, inBrackets, inTwoDollars, escaped, words, target, strong, emphasis, deleted, inAngles, bare] = match;
    const href = target ?? inAngles ?? bare;
    if (href !== undefined && (linked || !isSafe(href))) continue;  // stays text
    if (match.index > from) found.push(text.slice(from, match.index));
    const tex = inParens ?? inDollars ?? inBrackets ?? inTwoDollars;
    if (tex !== undefined) found.push({ tag: "maths", text: tex.trim(), display: (inBrackets ?? inTwoDollars) !== undefined });
    else if (escaped !== undefined) found.push(escaped);
    else if (href !== undefined) found.push({ tag: "a", href, spans: words?.trim() && !/https?:\/\//.test(words) ? spans(words, true) : [href] });
    else if (code !== undefined) found.push({ tag: "code", text: /^ .*\S.* $/s.test(code) ? code.slice(1, -1) : code });
    else {
      const tag = strong !== undefined ? "strong" : emphasis !== undefined ? "em" : "del";
      found.push({ tag, spans: spans(strong ?? emphasis ?? deleted, linked) });
    }
    from = match.index + whole.length;
  }
  if (from < text.length) found.push(text.slice(from));
  return found;
}

function made(tag, ...children) {
  const element = document.createElement(tag);
  element.append(...children);
  return element;
}

function inline(found) {
  return found.map((span) => {
    if (typeof span === "string") return span;
    if (span.tag === "maths") return maths(span.text, span.display);
    const element = made(span.tag, ...(span.tag === "code" ? [span.text] : inline(span.spans)));
    if (span.tag === "a") Object.assign(element, { href: span.href, title: span.href, target: "_blank", rel: "noopener noreferrer" });
    return element;
  });
}

function aligned(tag, found) {
  const element = made(tag, ...inline(found));
  element.dir = "auto";
  return element;
}

export function node(block) {
  switch (block.kind) {
    case "code": {
      const button = made("button", "Copy");
      button.type = "button";
      button.className = "copy";
      const coloured = highlight(block.text, block.language).map(([kind, text]) => {
        if (!kind) return text;
        const piece = made("span", text);
        piece.className = kind;
        return piece;
      });
      const code = made("code", ...coloured);
      const pre = made("pre", code);
      pre.tabIndex = 0;
      const whole = made("div", made("div", made("span", block.language), button), pre);
      whole.className = "code";
      whole.dir = "ltr";
      return whole;
    }
    case "maths": {
      const whole = made("div", maths(block.text, true));
      whole.className = "formula";
      whole.tabIndex = 0;
      whole.dir = "ltr";
      return whole;
    }
    case "heading":
      return aligned(`h${Math.min(block.level + 2, 6)}`, block.spans);
    case "rule":
      return made("hr");
    case "quote":
      return made("blockquote", ...block.blocks.map(node));
    case "list": {
      const list = made(block.ordered ? "ol" : "ul");
      if (block.ordered) list.start = block.start;
      list.dir = "auto";
      for (const item of block.items) {
        const [task, ...rest] = item[0]?.kind === "task" ? item : [null, ...item];
        const plain = rest[0]?.kind === "paragraph";
        const entry = plain ? aligned("li", rest[0].spans) : made("li");
        if (task) {
          const box = Object.assign(made("input"), { type: "checkbox", disabled: true, ariaLabel: task.done ? "done" : "to do" });
          box.defaultChecked = task.done;
          entry.prepend(box, " ");
          entry.className = "task";
        }
        entry.append(...rest.slice(plain ? 1 : 0).map(node));
        list.append(entry);
      }
      return list;
    }
    case "table": {
      const [head, ...rows] = block.rows.map((row, at) => {
        const entries = row.map((cell) => aligned(at ? "td" : "th", cell));
        entries.forEach((entry, column) => (entry.style.textAlign = block.align[column] ?? ""));
        return made("tr", ...entries);
      });
      const table = made("div", made("table", made("thead", head), made("tbody", ...rows)));
      table.className = "table";
      return table;
    }
    default:
      return aligned("p", block.spans);
  }
}

const shown = new WeakMap();

/** Shows a text in an element; blocks that are as they were stay, so that a selection in them does too. */
export function update(parent, text) {
  const before = shown.get(parent) ?? [];
  const now = parse(text);
  const keys = now.map((block) => JSON.stringify(block));
  let same = 0;
  while (same < keys.length && keys[same] === before[same]) same++;
  while (parent.childNodes.length > same) parent.lastChild.remove();
  parent.append(...now.slice(same).map(node));
  shown.set(parent, keys);
}
