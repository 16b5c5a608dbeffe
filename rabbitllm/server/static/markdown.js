// The little of Markdown that answers use, as DOM nodes. A model's text only ever becomes text nodes, never HTML.
// parse(text) -> blocks, plain data; node(block) -> an element; update(parent, text) changes only what is new.

const FENCE = /^(\s*)(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}(?:(?:- *){3,}|(?:\* *){3,}|(?:_ *){3,})$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(?:\s+(.*))?$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const DELIMITERS = /^\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;
// spans are bounded, so that a long text of opening marks takes no time
const SPAN = /(?<!`)(`{1,9})(?!`)([^]{1,2000}?)(?<!`)\1(?!`)|\*\*(?=\S)([^]{1,1000}?)(?<=\S)\*\*|\*(?=[^\s*])([^*]{1,1000}?)(?<=\S)\*(?!\*)/g;
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
      const rows = [cells(line)];
      for (at += 2; at < lines.length && lines[at].includes("|"); at++) rows.push(cells(lines[at]));
      blocks.push({ kind: "table", rows });
    } else {
      const inner = [line];
      for (at++; at < lines.length && lines[at].trim() && !begins(lines[at]); at++) inner.push(lines[at]);
      blocks.push({ kind: "paragraph", spans: spans(inner.join("\n").trim()) });
    }
  }
  return blocks;
}

const begins = (line) => [FENCE, HEADING, RULE, ITEM, QUOTE].some((kind) => kind.test(line));
const without = (line, count) => line.slice(Math.min(count, line.length - line.trimStart().length));
const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => spans(cell.trim()));

/** Reads the items of a list; what is indented below an item belongs to it. Returns the line after the list. */
function items(lines, at, list, depth) {
  const indent = ITEM.exec(lines[at])[1].length;
  while (at < lines.length) {
    const found = ITEM.exec(lines[at]);
    if (!found || found[1].length !== indent || /\d/.test(found[2]) !== list.ordered || RULE.test(lines[at])) break;
    const inner = [found[3] ?? ""];
    for (at++; at < lines.length; at++) {
      const line = lines[at];
      const deeper = line.length - line.trimStart().length > indent;
      const next = lines[at + 1] ?? "";
      const goesOn = line.trim() ? deeper || !(begins(line) || !lines[at - 1].trim()) : /^\s/.test(next) && next.trim();
      if (!goesOn) break;
      inner.push(without(line, indent + found[2].length + 1));
    }
    list.items.push(parse(inner.join("\n"), depth + 1));
    while (at < lines.length && !lines[at].trim() && ITEM.test(lines[at + 1] ?? "")) at++;
  }
  return at;
}

function spans(text) {
  const found = [];
  let from = 0;
  for (const match of text.matchAll(SPAN)) {
    if (match.index > from) found.push(text.slice(from, match.index));
    const [whole, , code, strong, emphasis] = match;
    if (code !== undefined) found.push({ tag: "code", text: /^ .*\S.* $/s.test(code) ? code.slice(1, -1) : code });
    else found.push({ tag: strong !== undefined ? "strong" : "em", spans: spans(strong ?? emphasis) });
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
    return made(span.tag, ...(span.tag === "code" ? [span.text] : inline(span.spans)));
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
      const code = made("code", block.text);
      const pre = made("pre", code);
      pre.tabIndex = 0;
      const whole = made("div", made("div", made("span", block.language), button), pre);
      whole.className = "code";
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
        const plain = item.length && item[0].kind === "paragraph";
        const entry = plain ? aligned("li", item[0].spans) : made("li");
        entry.append(...item.slice(plain ? 1 : 0).map(node));
        list.append(entry);
      }
      return list;
    }
    case "table": {
      const [head, ...rows] = block.rows.map((row, at) => made("tr", ...row.map((cell) => aligned(at ? "td" : "th", cell))));
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
