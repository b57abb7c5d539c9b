// Selections that are kept by name, and how a set of cells is written: by its rule, or as one bit for each cell.

import { count, el, icon, ICONS } from "./dom.js";

const MOST = 64;
const LONGEST = 200;

function toBase64(bytes) {
  let text = "";
  for (let i = 0; i < bytes.length; i += 8192) text += String.fromCharCode(...bytes.subarray(i, i + 8192));
  return btoa(text);
}

function fromBase64(text) {
  return Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
}

// One bit for each of n cells, the lowest first, in base64: as the server reads sets of cells.
export function pack(rows, n) {
  return toBase64(bits(rows, n));
}

function bits(rows, n) {
  const bytes = new Uint8Array(Math.ceil(n / 8));
  for (const row of rows) bytes[row >> 3] |= 1 << (row & 7);
  return bytes;
}

export function unpack(text, n) {
  return rowsOf(fromBase64(text), n);
}

function rowsOf(bytes, n) {
  if (bytes.length !== Math.ceil(n / 8)) throw new Error("The link holds a selection of another page.");
  const rows = [];
  for (let row = 0; row < n; row++) if (bytes[row >> 3] & (1 << (row & 7))) rows.push(row);
  return rows;
}

async function through(bytes, stream) {
  return new Uint8Array(await new Response(new Blob([bytes]).stream().pipeThrough(stream)).arrayBuffer());
}

export async function compress(rows, n) {
  const packed = await through(bits(rows, n), new CompressionStream("deflate-raw"));
  return toBase64(packed).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

export async function decompress(text, n) {
  const packed = fromBase64(text.replaceAll("-", "+").replaceAll("_", "/"));
  // Read step by step, so that a hostile link cannot fill the memory.
  const reader = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate-raw")).getReader();
  const bytes = new Uint8Array(Math.ceil(n / 8));
  let at = 0;
  for (let { done, value } = await reader.read(); !done; { done, value } = await reader.read()) {
    if (at + value.length > bytes.length) throw new Error("The link holds a selection of another page.");
    bytes.set(value, at);
    at += value.length;
  }
  return rowsOf(bytes.subarray(0, at), n);
}

// The rows of a rule: values of a category, or a range of a column or gene.
export async function rowsOfRule(rule, app) {
  const column = await (rule.gene ? app.loadGene(String(rule.name)) : app.load(String(rule.name)));
  const rows = [];
  if (column.kind === "category" && Array.isArray(rule.labels)) {
    const wanted = new Set(column.labels.flatMap((label, code) => (rule.labels.includes(label) ? [code] : [])));
    for (let i = 0; i < app.n; i++) if (wanted.has(column.codes[i])) rows.push(i);
  } else if (column.kind === "number") {
    const shown = (value) => (rule.log ? Math.log1p(value) : value);
    const [low, high] = [rule.low ?? -Infinity, rule.high ?? Infinity];
    for (let i = 0; i < app.n; i++) {
      const value = shown(column.values[i]);
      if (value >= low && value <= high) rows.push(i);
    }
  }
  return rows;
}

export class Sets {
  constructor(host, app) {
    Object.assign(this, { host, app, all: [] });
  }

  keep(name, rows, rule = null) {
    const title = name.trim().slice(0, LONGEST) || `Selection ${this.all.length + 1}`;
    const others = this.all.filter((set) => set.name !== title);
    if (others.length >= MOST) throw new Error(`A page keeps at most ${MOST} selections; remove one first.`);
    const set = { name: title, rows: Uint32Array.from(rows).sort(), rule };
    this.all = [...others, set];
    this.show();
    return set;
  }

  remove(name) {
    this.all = this.all.filter((set) => set.name !== name);
    this.show();
  }

  get(name) {
    return this.all.find((set) => set.name === name);
  }

  show() {
    const items = this.all.map((set) =>
      el(
        "li",
        {},
        el("button", { class: "category", type: "button", title: `Select ${set.name}`, onclick: () => this.app.selectRows([...set.rows], { rule: set.rule }) },
          el("span", { class: "name" }, set.name), el("span", { class: "number" }, count(set.rows.length))),
        el("button", { class: "drop", type: "button", title: `Remove ${set.name}`, "aria-label": `Remove ${set.name}`, onclick: () => this.remove(set.name) }, icon(...ICONS.close)),
      ),
    );
    this.host.replaceChildren(...(items.length ? [el("h2", {}, "Kept selections"), el("ul", { class: "sets" }, items)] : []));
    this.app.drawer?.refresh();
  }
}
