// Colours of code: highlight(text, language) -> [kind, text] pairs, which together are the text. Kinds are "" for
// nothing, and comment, string, number, word, name, added, removed. One expression for each family of languages.

const LONGEST = 60_000;
const END = "(?![^])";  // of the text; $ is that of a line
// what does not end goes to the end of its line, so that a long line of quotes is read once
const quoted = (mark) => String.raw`${mark}(?:\\.|[^${mark}\\\n])*(?:${mark}|\\?$)`;
const STRINGS = [quoted('"'), quoted("'")];
const BLOCK = String.raw`\/\*[^]*?(?:\*\/|${END})`;
const NUMBER = String.raw`\b(?:0[xXbBoO][\da-fA-F_]+|\d[\d_]*(?:\.\d[\d_]*)?(?:[eE][+-]?\d+)?)\w*`;
const CALLED = String.raw`[A-Za-z_$][\w$]{0,100}(?=\()`;
const words = (text) => String.raw`\b(?:${text.trim().replace(/\s+/g, "|")})\b`;

const OF_C = `if else for while do switch case default break continue return new delete class struct enum union interface
  extends implements public private protected static const constexpr let var function async await yield import export from
  of in instanceof typeof void int long short char float double bool boolean unsigned signed auto namespace using template
  typename virtual override final abstract try catch finally throw throws this super null nullptr true false undefined NULL
  type readonly package goto sizeof extern inline volatile string val when object data sealed fn fun func mut pub impl trait
  match use mod crate self Self where loop move ref dyn unsafe as defer go chan map range select nil guard protocol extension
  def echo foreach internal record`;
const OF_PYTHON = `and as assert async await break case class continue def del elif else except finally for from global if
  import in is lambda match nonlocal not or pass raise return try while with yield None True False self print do end
  module require then unless until begin rescue nil true false elsif attr_accessor`;
const OF_SHELL = `if then else elif fi for while until do done case esac in function return local export set unset echo cd
  exit source alias sudo true false FROM RUN COPY ENV WORKDIR ENTRYPOINT CMD EXPOSE ARG`;
const OF_SQL = `select from where insert into values update set delete create table alter drop index view join left right
  inner outer full cross on group by order having limit offset union all distinct as and or not null is in exists between
  like case when then else end primary key foreign references unique default with asc desc count sum avg min max int integer
  text varchar boolean date timestamp cascade constraint begin commit rollback true false`;
const OF_LUA = `and break do else elseif end false for function if in local nil not or repeat return then true until while
  module where import data type class instance let of deriving case newtype`;

/** Kind -> expressions, in the order in which they are tried. */
const FAMILIES = {
  c: { comment: [String.raw`\/\/[^\n]*`, BLOCK], string: [...STRINGS, String.raw`\x60(?:\\[^]|[^\x60\\])*(?:\x60|\\?${END})`], number: [NUMBER], word: [words(OF_C), String.raw`^[ \t]*#\w+`], name: [CALLED] },
  rust: { comment: [String.raw`\/\/[^\n]*`, BLOCK], string: [STRINGS[0], String.raw`'(?:\\.|[^'\\\n])'`], number: [NUMBER], word: [words(OF_C)], name: [CALLED] },
  python: { comment: [String.raw`#[^\n]*`], string: [String.raw`"""[^]*?(?:"""|${END})`, String.raw`'''[^]*?(?:'''|${END})`, ...STRINGS], number: [NUMBER], word: [words(OF_PYTHON), String.raw`@\w+`], name: [CALLED] },
  shell: { comment: [String.raw`(?<![^\s])#[^\n]*`], string: STRINGS, number: [], word: [words(OF_SHELL)], name: [String.raw`\$\{?\w+\}?`, String.raw`(?<=\s)--?[\w-]+`] },
  data: { comment: [String.raw`(?<![^\s])#[^\n]*`], name: [String.raw`"(?:\\.|[^"\\\n])*"(?=\s*:)`, String.raw`^[ \t]*(?:- )?[\w.-]{1,100}(?=\s*[:=])`, String.raw`^\[.*\]`], string: STRINGS, number: [NUMBER], word: [words("true false null yes no")] },
  sql: { comment: [String.raw`--[^\n]*`, BLOCK], string: STRINGS, number: [NUMBER], word: [words(`${OF_SQL} ${OF_SQL.toUpperCase()}`)], name: [CALLED] },
  lua: { comment: [String.raw`--[^\n]*`], string: [STRINGS[0], String.raw`'(?:\\.|[^'\\\n]){0,200}'`], number: [NUMBER], word: [words(OF_LUA)], name: [CALLED] },
  markup: { comment: [String.raw`<!--[^]*?(?:-->|${END})`], word: [String.raw`<\/?[\w:-]+`, String.raw`\/?>`], name: [String.raw`[\w:-]{1,100}(?==["'])`], string: [quoted('"')] },
  css: { comment: [BLOCK], string: STRINGS, word: [String.raw`@[\w-]+`, String.raw`!important`], name: [String.raw`[\w-]{1,100}(?=\s*:)`], number: [String.raw`#[\da-fA-F]{3,8}\b`, String.raw`\b\d[\d.]*(?:%|[a-z]+)?`] },
  diff: { name: [String.raw`^(?:@@|diff|index|---|\+\+\+).*`], added: [String.raw`^\+.*`], removed: [String.raw`^-.*`] },
};
const NAMES = {
  c: "c h cpp c++ cc hpp cs csharp java js javascript mjs jsx ts tsx typescript go golang kotlin kt swift php dart scala groovy zig objc",
  rust: "rust rs", python: "python py ruby rb r julia jl perl pl elixir gdscript", css: "css scss less", diff: "diff patch",
  shell: "bash sh shell zsh fish console powershell ps1 dockerfile docker makefile make", data: "json json5 jsonl yaml yml toml ini env",
  sql: "sql postgresql sqlite mysql", lua: "lua haskell hs elm ada", markup: "html xml svg vue xhtml",
};
const FAMILY = new Map(Object.entries(NAMES).flatMap(([family, names]) => names.split(" ").map((name) => [name, family])));
const expressions = new Map();

function expressionOf(family) {
  if (!expressions.has(family)) {
    const kinds = Object.entries(FAMILIES[family]).filter(([, sources]) => sources.length);
    expressions.set(family, new RegExp(kinds.map(([kind, sources]) => `(?<${kind}>${sources.join("|")})`).join("|"), "gm"));
  }
  return expressions.get(family);
}

export function highlight(text, language) {
  const family = FAMILY.get(language.toLowerCase());
  if (!family || text.length > LONGEST) return [["", text]];
  const pieces = [];
  let from = 0;
  for (const match of text.matchAll(expressionOf(family))) {
    if (!match[0]) continue;
    if (match.index > from) pieces.push(["", text.slice(from, match.index)]);
    const [kind] = Object.entries(match.groups).find(([, piece]) => piece !== undefined);
    pieces.push([kind, match[0]]);
    from = match.index + match[0].length;
  }
  if (from < text.length) pieces.push(["", text.slice(from)]);
  return pieces;
}
