// The part of TeX that answers use, as MathML. read(tex) -> a tree of [tag, attributes, ...children], plain data, whose
// tags are all written here; null where it is no such formula. maths(tex, display) -> an element.

const XMLNS = "http://www.w3.org/1998/Math/MathML";
const DEEPEST = 30;
const LONGEST = 4000;
const pairs = (text) => Object.fromEntries(text.trim().split(/\s+/).map((pair) => pair.split("=")));
const words = (text) => new Set(text.split(" "));

const LETTERS = pairs(`alpha=α beta=β gamma=γ delta=δ epsilon=ϵ varepsilon=ε zeta=ζ eta=η theta=θ vartheta=ϑ iota=ι kappa=κ
  lambda=λ mu=μ nu=ν xi=ξ pi=π rho=ρ sigma=σ varsigma=ς tau=τ upsilon=υ phi=ϕ varphi=φ chi=χ psi=ψ omega=ω
  Gamma=Γ Delta=Δ Theta=Θ Lambda=Λ Xi=Ξ Pi=Π Sigma=Σ Upsilon=Υ Phi=Φ Psi=Ψ Omega=Ω
  infty=∞ hbar=ℏ ell=ℓ partial=∂ nabla=∇ emptyset=∅ varnothing=∅ Re=ℜ Im=ℑ aleph=ℵ top=⊤ bot=⊥ angle=∠ degree=°
  ldots=… dots=… cdots=⋯ vdots=⋮ ddots=⋱ prime=′ square=□ triangle=△ checkmark=✓`);
const OPERATORS = pairs(`times=× div=÷ cdot=⋅ pm=± mp=∓ ast=∗ star=⋆ circ=∘ bullet=∙ oplus=⊕ otimes=⊗ setminus=∖
  le=≤ leq=≤ ge=≥ geq=≥ ne=≠ neq=≠ approx=≈ equiv=≡ sim=∼ simeq=≃ cong=≅ propto=∝ ll=≪ gg=≫ prec=≺ succ=≻
  in=∈ notin=∉ ni=∋ subset=⊂ subseteq=⊆ supset=⊃ supseteq=⊇ cup=∪ cap=∩ forall=∀ exists=∃ nexists=∄ neg=¬ lnot=¬
  land=∧ wedge=∧ lor=∨ vee=∨ to=→ rightarrow=→ gets=← leftarrow=← leftrightarrow=↔ Rightarrow=⇒ implies=⟹ Leftarrow=⇐
  iff=⟺ Leftrightarrow=⇔ mapsto=↦ longrightarrow=⟶ uparrow=↑ downarrow=↓ rightharpoonup=⇀ rightleftharpoons=⇌
  mid=∣ parallel=∥ perp=⊥ vdash=⊢ models=⊨ therefore=∴ because=∵ colon=: lbrace={ rbrace=} lvert=| rvert=| vert=|
  Vert=‖ lVert=‖ rVert=‖ langle=⟨ rangle=⟩ lfloor=⌊ rfloor=⌋ lceil=⌈ rceil=⌉ lbrack=[ rbrack=] backslash=\\ dagger=†`);
const LARGE = pairs("sum=∑ prod=∏ coprod=∐ bigcup=⋃ bigcap=⋂ bigoplus=⨁ bigotimes=⨂ bigwedge=⋀ bigvee=⋁");
const INTEGRALS = pairs("int=∫ iint=∬ iiint=∭ oint=∮");
const FUNCTIONS = words("sin cos tan cot sec csc sinh cosh tanh arcsin arccos arctan log ln lg exp det dim ker deg arg gcd hom Pr");
const LIMITS = words("lim max min sup inf limsup liminf argmax argmin");
const SPACES = { ",": ".17em", ":": ".22em", ";": ".28em", "!": "-.17em", " ": ".25em", quad: "1em", qquad: "2em", thinspace: ".17em" };
const ACCENTS = pairs("hat=^ widehat=^ bar=¯ overline=¯ vec=→ overrightarrow=→ tilde=~ widetilde=~ dot=˙ ddot=¨ overbrace=⏞ underline=_ underbrace=⏟");
const FENCES = { matrix: "", pmatrix: "()", bmatrix: "[]", Bmatrix: "{}", vmatrix: "||", Vmatrix: "‖‖", cases: "{", smallmatrix: "", array: "" };
const ALIGNED = words("align aligned split gather gathered equation multline eqnarray");
const TEXTS = words("text textrm textbf textit mbox mathrm operatorname mathsf mathtt textsf texttt");
// mathematical alphabets: the first capital, small letter and digit, and letters that are elsewhere
const ALPHABETS = {
  mathbf: [0x1d400, 0x1d41a, 0x1d7ce], boldsymbol: [0x1d468, 0x1d482, 0x1d7ce], bm: [0x1d468, 0x1d482, 0x1d7ce],
  mathbb: [0x1d538, 0x1d552, 0x1d7d8, { C: "ℂ", H: "ℍ", N: "ℕ", P: "ℙ", Q: "ℚ", R: "ℝ", Z: "ℤ" }],
  mathcal: [0x1d49c, 0x1d4b6, 0, { B: "ℬ", E: "ℰ", F: "ℱ", H: "ℋ", I: "ℐ", L: "ℒ", M: "ℳ", R: "ℛ", e: "ℯ", g: "ℊ", o: "ℴ" }],
  mathfrak: [0x1d504, 0x1d51e, 0, { C: "ℭ", H: "ℌ", I: "ℑ", R: "ℜ", Z: "ℨ" }],
};
ALPHABETS.mathscr = ALPHABETS.mathcal;

const own = (table, name) => (Object.hasOwn(table, name) ? table[name] : undefined);

function styled(text, alphabet) {
  const [capital, small, digit, others = {}] = alphabet;
  return Array.from(text, (letter) => {
    const [base, first] = letter >= "a" && letter <= "z" ? [small, "a"] : letter >= "A" && letter <= "Z" ? [capital, "A"] : [digit, "0"];
    if (own(others, letter)) return others[letter];
    return base && /[a-zA-Z0-9]/.test(letter) ? String.fromCodePoint(base + letter.codePointAt(0) - first.codePointAt(0)) : letter;
  }).join("");
}

class Unreadable extends Error {}

class Reader {
  #tokens;
  #at = 0;
  #depth = 0;

  constructor(tex) {
    this.#tokens = tex.match(/\\[a-zA-Z]+\*?|\\[^]|\d+(?:[.,]\d+)*|\s+|[^]/gu) ?? [];
  }

  get #next() {
    while (/^\s/.test(this.#tokens[this.#at] ?? "")) this.#at++;
    return this.#tokens[this.#at];
  }

  #take(expected) {
    const token = this.#next;
    if (token === undefined || (expected && token !== expected)) throw new Unreadable();
    this.#at++;
    return token;
  }

  whole() {
    const read = this.#rows(() => false);
    if (this.#next !== undefined) throw new Unreadable();
    return read.length === 1 && read[0].length === 1 ? read[0][0] : table(read, true);
  }

  /** Rows of cells, up to what ends them. */
  #rows(ends) {
    const rows = [[]];
    for (;;) {
      rows.at(-1).push(this.#row((token) => token === "&" || token === "\\\\" || ends(token)));
      if (this.#next === "&") this.#take();
      else if (this.#next === "\\\\") {
        this.#take();
        rows.push([]);
      } else break;
    }
    if (rows.length > 1 && rows.at(-1).length === 1 && rows.at(-1)[0].length === 2) rows.pop();  // after the last \\
    return rows;
  }

  #row(ends) {
    if (++this.#depth > DEEPEST) throw new Unreadable();
    const row = ["mrow", {}];
    while (this.#next !== undefined && !ends(this.#next) && this.#next !== "}") row.push(this.#scripted());
    this.#depth--;
    return row;
  }

  #group() {
    if (++this.#depth > DEEPEST) throw new Unreadable();
    const read = this.#next === "{" ? this.#braced() : this.#atom();
    this.#depth--;
    return read;
  }

  #braced() {
    this.#take("{");
    const row = this.#row(() => false);
    this.#take("}");
    return row.length === 3 ? row[2] : row;
  }

  /** The letters between braces, as they are. */
  #raw() {
    this.#take("{");
    let [text, open] = ["", 1];
    while (this.#at < this.#tokens.length) {
      const token = this.#tokens[this.#at++];
      open += (token === "{") - (token === "}");
      if (!open) return text;
      if (token !== "{" && token !== "}") text += token.replace(/^\\(?=[^a-zA-Z])/, "");
    }
    throw new Unreadable();
  }

  #scripted() {
    const base = /^[\^_]$/.test(this.#next) ? ["mrow", {}] : this.#atom();
    let [below, above] = [null, null];
    const primes = [];
    for (;;) {
      if (this.#next === "'") primes.push(this.#take());
      else if (this.#next === "_" && !below) [, below] = [this.#take(), this.#group()];
      else if (this.#next === "^" && !above) [, above] = [this.#take(), this.#group()];
      else if (this.#next === "\\limits" || this.#next === "\\nolimits") this.#take();
      else break;
    }
    if (primes.length) above = ["mrow", {}, ["mi", {}, "′".repeat(primes.length)], ...(above ? [above] : [])];
    const kind = base[1].movablelimits || (/^m(under|over)$/.test(base[0]) && !base[1].accent) ? ["munder", "mover"] : ["msub", "msup"];
    if (below && above) return [kind[0] + kind[1].slice(1), {}, base, below, above];
    return below ? [kind[0], {}, base, below] : above ? [kind[1], {}, base, above] : base;
  }

  #fence() {
    const token = this.#take();
    return token === "." ? "" : token === "\\|" ? "‖" : own(OPERATORS, token.slice(1)) ?? token.replace(/^\\(?=[{}])/, "");
  }

  #atom() {
    if (this.#next === "{") return this.#braced();
    const token = this.#take();
    if (/^\d/.test(token)) return ["mn", {}, token];
    if (/^\p{L}$/u.test(token)) return ["mi", {}, token];
    if (token === "-") return ["mo", {}, "−"];
    if (token === "~") return ["mspace", { width: SPACES[" "] }];
    if (/[&^_}]/.test(token)) throw new Unreadable();
    return token[0] === "\\" && token.length > 1 ? this.#command(token.slice(1)) : ["mo", fixed(token), token];
  }

  #command(name) {
    if (own(LETTERS, name)) return ["mi", /^[A-Z∞]/.test(LETTERS[name]) ? { mathvariant: "normal" } : {}, LETTERS[name]];
    if (own(OPERATORS, name)) return ["mo", fixed(OPERATORS[name]), OPERATORS[name]];
    if (own(LARGE, name)) return ["mo", { movablelimits: "true", largeop: "true" }, LARGE[name]];
    if (own(INTEGRALS, name)) return ["mo", { largeop: "true" }, INTEGRALS[name]];
    if (LIMITS.has(name)) return ["mo", { movablelimits: "true", lspace: "0", rspace: ".17em" }, name];
    if (FUNCTIONS.has(name)) return ["mo", { lspace: ".1em", rspace: this.#next === "(" ? "0" : ".17em" }, name];
    if (own(SPACES, name)) return ["mspace", { width: SPACES[name] }];
    if (/^[{}$%&#_|]$/.test(name)) return ["mo", { stretchy: "false" }, name === "|" ? "‖" : name];
    if (TEXTS.has(name.replace("*", ""))) {
      const text = this.#raw().replace(/\s+/g, "\u00a0");
      return name.startsWith("operatorname") ? ["mo", { lspace: ".1em", rspace: ".17em" }, text] : ["mtext", {}, text];
    }
    if (own(ALPHABETS, name)) return restyled(this.#group(), ALPHABETS[name]);
    if (own(ACCENTS, name)) {
      const mark = ["mo", { stretchy: String(/wide|over|under/.test(name)) }, ACCENTS[name]];
      return [name.startsWith("under") ? "munder" : "mover", /brace/.test(name) ? {} : { accent: "true" }, this.#group(), mark];
    }
    switch (name) {
      case "frac": case "dfrac": case "tfrac": case "cfrac":
        return ["mfrac", {}, this.#group(), this.#group()];
      case "binom":
        return fenced("(", ["mfrac", { linethickness: "0" }, this.#group(), this.#group()], ")");
      case "sqrt": {
        if (this.#next !== "[") return ["msqrt", {}, this.#group()];
        this.#take();
        const degree = this.#row((token) => token === "]");
        this.#take("]");
        return ["mroot", {}, this.#group(), degree];
      }
      case "left": {
        const open = this.#fence();
        const inner = this.#row((token) => token === "\\right");
        this.#take("\\right");
        return fenced(open, inner, this.#fence());
      }
      case "middle":
        return ["mo", { stretchy: "true" }, this.#fence()];
      case "overset": case "stackrel": case "underset": {
        const [script, base] = [this.#group(), this.#group()];
        return [name === "underset" ? "munder" : "mover", {}, base, script];
      }
      case "boxed":
        return ["mrow", { class: "boxed" }, this.#group()];
      case "not":
        return struck(this.#group());
      case "pmod":
        return ["mrow", {}, ["mspace", { width: "1em" }], ["mo", {}, "("], ["mi", {}, "mod"], ["mspace", { width: ".3em" }], this.#group(), ["mo", {}, ")"]];
      case "bmod": case "mod":
        return ["mo", { lspace: ".3em", rspace: ".3em" }, "mod"];
      case "begin":
        return this.#environment(this.#raw());
      case "displaystyle": case "textstyle": case "nonumber": case "notag": case "limits": case "nolimits":
        return ["mrow", {}];
      case "tag": case "label":
        this.#raw();
        return ["mrow", {}];
    }
    if (/^[bB]ig+[lrm]?$/.test(name)) return ["mo", { stretchy: "false" }, this.#fence()];
    return ["mtext", {}, `\\${name}`];
  }

  #environment(full) {
    const name = full.replace("*", "");
    const fences = own(FENCES, name);
    if (fences === undefined && !ALIGNED.has(name)) throw new Unreadable();
    if (name === "array" && this.#next === "{") this.#raw();
    if (++this.#depth > DEEPEST) throw new Unreadable();
    const rows = this.#rows((token) => token === "\\end");
    this.#depth--;
    this.#take("\\end");
    if (this.#raw() !== full) throw new Unreadable();
    const read = table(rows, ALIGNED.has(name), name === "cases");
    return fences ? fenced(fences[0], read, fences[1] ?? "") : read;
  }
}

/** Only what stands behind \left and \right grows. */
const fixed = (sign) => (/^[()[\]{}|‖⟨⟩⌊⌋⌈⌉/]$/.test(sign) ? { stretchy: "false" } : {});
const fenced = (open, inner, close) => ["mrow", {}, ...[open, null, close].flatMap((sign) => (
  sign === null ? [inner] : sign ? [["mo", { stretchy: "true" }, sign]] : []
))];
const table = (rows, display, left = false) => [
  "mtable", { class: display ? "aligned" : left ? "cases" : "", ...(display && { displaystyle: "true" }) },
  ...rows.map((cells) => ["mtr", {}, ...cells.map((cell) => ["mtd", {}, cell])]),
];

function restyled([tag, attributes, ...children], alphabet) {
  const changed = children.map((child) => (typeof child === "string" ? styled(child, alphabet) : restyled(child, alphabet)));
  return [tag, tag === "mi" ? { mathvariant: "normal" } : attributes, ...changed];
}

/** Crossed out, where it is one sign. */
const struck = ([tag, attributes, ...children]) => (
  [tag, attributes, ...children.map((child) => (typeof child === "string" && children.length === 1 ? `${child}\u0338` : child))]
);

export function read(tex) {
  if (tex.length > LONGEST) return null;
  try {
    return new Reader(tex).whole();
  } catch (error) {
    if (error instanceof Unreadable) return null;
    throw error;
  }
}

function built([tag, attributes, ...children]) {
  const element = document.createElementNS(XMLNS, tag);
  for (const [name, value] of Object.entries(attributes)) if (value) element.setAttribute(name, value);
  element.append(...children.map((child) => (typeof child === "string" ? child : built(child))));
  return element;
}

/** A formula; as it was written where it cannot be read. */
export function maths(tex, display) {
  const tree = read(tex);
  if (!tree) {
    const code = document.createElement("code");
    code.append(tex);
    return code;
  }
  const element = built(["math", { display: display ? "block" : "inline" }, tree]);
  element.ariaLabel = tex;
  return element;
}
