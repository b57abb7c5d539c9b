// What the points are coloured by: a category or a number turned into codes, a palette, a draw order and a legend.

import { chunk, Texts } from "./data.js";
import { categoryColors, LEVELS, ramped, themed } from "./colors.js";

const BINS = 48;

export class Category {
  constructor(spec, data) {
    this.spec = spec;
    this.kind = "category";
    this.name = spec.name;
    this.codes = data.values;
    this.labels = Array.from(data.dictionary, (label) => label ?? "");
    this.n = data.length;
    this.hidden = new Set();
    this.named = Object.keys(spec.colors ?? {}).length > 0; // colours come with the data
    this.own = this.named; // and are drawn; else the palette that colour-blind readers can tell apart
    this.missing = spec.missing ? this.labels.length - 1 : -1;
    if (spec.missing) this.labels[this.missing] = "missing";
    this.counts = new Uint32Array(this.labels.length);
    for (let i = 0; i < this.n; i++) this.counts[this.codes[i]]++;
  }

  colors(theme) {
    const named = this.missing < 0 ? this.labels : this.labels.slice(0, -1);
    const colors = categoryColors(named, this.own ? this.spec.colors : {});
    return this.missing < 0 ? colors : [...colors, themed(theme).missing];
  }

  // Codes and palette; what is hidden takes the last colour and lies below.
  painted(theme) {
    const palette = [...this.colors(theme), themed(theme).dimmed];
    const dimmed = palette.length - 1;
    if (!this.hidden.size && this.missing < 0) return { codes: this.codes, palette, order: null };
    const codes = Uint32Array.from(this.codes, (code) => (this.hidden.has(code) ? dimmed : code));
    const below = (code) => (code === dimmed ? 0 : code === this.missing ? 1 : 2);
    return { codes, palette, order: layered(codes, below, 3) };
  }

  passes(row) {
    return !this.hidden.has(this.codes[row]);
  }

  text(row) {
    return this.labels[this.codes[row]];
  }
}

export class Numbers {
  constructor(spec, data, { expression = false } = {}) {
    this.spec = spec;
    this.kind = "number";
    this.name = spec.name;
    this.values = data.values;
    this.n = data.length;
    this.expression = expression;
    this.measure();
    this.log = expression && this.wholes && this.max > 20;
    this.scale = expression ? "expression" : "viridis";
    this.range = null;
    this.spread();
  }

  measure() {
    let min = Infinity;
    let max = -Infinity;
    let known = 0;
    let wholes = true;
    for (const value of this.values) {
      if (!Number.isFinite(value)) continue;
      known++;
      if (value < min) min = value;
      if (value > max) max = value;
      if (wholes && !Number.isInteger(value)) wholes = false;
    }
    Object.assign(this, { min, max, known, wholes: wholes && known > 0 });
  }

  shown(value) {
    return this.log ? Math.log1p(value) : value;
  }

  unshown(value) {
    return this.log ? Math.expm1(value) : value;
  }

  // The colours span the middle 99 %, so that a few extremes do not flatten the rest.
  spread() {
    const sample = [];
    const step = Math.max(1, Math.floor(this.n / 50_000));
    for (let i = 0; i < this.n; i += step) {
      const value = this.values[i];
      if (Number.isFinite(value) && !(this.expression && value === 0)) sample.push(this.shown(value));
    }
    sample.sort((a, b) => a - b);
    const at = (q) => sample[Math.min(sample.length - 1, Math.floor(q * sample.length))];
    let low = this.expression ? Math.min(0, this.shown(this.min)) : at(0.005);
    let high = at(0.995);
    if (!sample.length) [low, high] = [this.shown(this.min), this.shown(this.max)];
    if (!(high > low)) [low, high] = [this.shown(this.min), this.shown(this.max)];
    if (this.scale === "diverging") {
      high = Math.max(Math.abs(low), Math.abs(high));
      low = -high;
    }
    this.domain = [low, high > low ? high : low + 1];
    this.#count();
  }

  #count() {
    const bins = new Uint32Array(BINS);
    const [low, high] = this.domain;
    for (const value of this.values) {
      if (!Number.isFinite(value)) continue;
      const at = Math.floor(((this.shown(value) - low) / (high - low)) * BINS);
      bins[Math.max(0, Math.min(BINS - 1, at))]++;
    }
    this.bins = bins;
  }

  setLog(on) {
    this.log = on;
    this.range = null;
    this.spread();
  }

  setScale(name) {
    this.scale = name;
    this.spread();
  }

  painted(theme) {
    const palette = [...ramped(this.scale, theme), themed(theme).missing, themed(theme).dimmed];
    const [low, high] = this.domain;
    const factor = LEVELS / (high - low);
    const codes = new Uint8Array(this.n);
    for (let i = 0; i < this.n; i++) {
      const value = this.values[i];
      if (!Number.isFinite(value)) codes[i] = LEVELS;
      else if (!this.passes(i)) codes[i] = LEVELS + 1;
      else codes[i] = Math.max(0, Math.min(LEVELS - 1, Math.floor((this.shown(value) - low) * factor)));
    }
    const lifts = this.expression || this.range !== null || this.known < this.n;
    const rank = (code) => (code === LEVELS + 1 ? 0 : code === LEVELS ? 1 : this.expression ? 2 + code : 2);
    return { codes, palette, order: lifts ? layered(codes, rank, LEVELS + 2) : null };
  }

  passes(row) {
    if (this.range === null) return true;
    const value = this.shown(this.values[row]);
    return value >= this.range[0] && value <= this.range[1];
  }

  text(row) {
    return this.values[row];
  }
}

// Rows sorted by the layer of their code, from the bottom to the top, in one counting pass.
function layered(codes, layer, layers) {
  const starts = new Uint32Array(layers + 1);
  for (const code of codes) starts[layer(code) + 1]++;
  for (let i = 0; i < layers; i++) starts[i + 1] += starts[i];
  const order = new Array(codes.length);
  for (let i = 0; i < codes.length; i++) order[starts[layer(codes[i])]++] = i;
  return order;
}

class Words {
  constructor(spec, data) {
    this.spec = spec;
    this.kind = "text";
    this.name = spec.name;
    this.texts = new Texts(data);
    this.n = this.texts.length;
  }

  // As `CountsTab.counted`; the texts of all cells are never held at once.
  counted(rows, most) {
    const counts = new Map();
    for (const row of rows) counts.set(this.text(row), (counts.get(this.text(row)) ?? 0) + 1);
    const found = [...counts].sort((a, b) => b[1] - a[1] || (a[0] < b[0] ? -1 : 1)).slice(0, most).map(([label, n]) => ({ label, n, all: 0 }));
    const wanted = new Map(found.map((one) => [one.label, one]));
    for (let row = 0; row < this.n; row++) {
      const one = wanted.get(this.text(row));
      if (one) one.all++;
    }
    return { found, others: counts.size - found.length };
  }

  text(row) {
    return this.texts.get(row);
  }
}

const KINDS = { category: Category, number: Numbers, text: Words };

export function read(spec, table, options) {
  return new KINDS[spec.kind](spec, chunk(table), options);
}
