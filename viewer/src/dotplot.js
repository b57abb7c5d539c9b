// A set of genes by groups of cells: the colour of a dot is the mean, its area the fraction of cells with a value above zero.

import { ramped } from "./colors.js";
import { csv } from "./compare.js";
import { count, el, percent, saveFile, short } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const STEP = 26;
const LARGEST = 11;
const SETS = "\u0000sets";
const MOST_GROUPS = 60;

function draw(tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

export function parseGenes(text) {
  return [...new Set(text.split(/[\s,;]+/).filter(Boolean))];
}

export class DotplotTab {
  constructor(app) {
    this.app = app;
    this.title = "Dot plot";
    this.scaled = true;
    this.data = null;
  }

  show(host) {
    const { app } = this;
    const genes = el("textarea", { rows: 3, placeholder: "Paste names of genes", "aria-label": "Gene set", spellcheck: "false", oninput: () => (app.geneSet = parseGenes(genes.value)) });
    genes.value = app.geneSet.join(" ");
    const groups = app.columns.filter((spec) => spec.kind === "category").map((spec) => [spec.name, spec.name]);
    if (app.sets.all.length) groups.push([SETS, "kept selections"]);
    const by = el("select", { "aria-label": "Group by", onchange: () => (this.by = by.value) }, groups.map(([value, text]) => el("option", { value }, text)));
    const usual = this.by ?? (app.column?.kind === "category" ? app.column.name : groups[0]?.[0]);
    by.value = groups.some(([value]) => value === usual) ? usual : groups[0]?.[0] ?? "";
    this.by = by.value;
    const scale = el("input", { type: "checkbox", checked: this.scaled, onchange: (event) => { this.scaled = event.target.checked; app.drawer.refresh(); } });
    host.append(el("div", { class: "form top" }, genes,
      el("div", { class: "stack" }, el("label", { class: "muted" }, "by ", by), el("label", { class: "check" }, scale, "scale each gene")),
      el("button", { class: "button main", type: "button", onclick: () => this.draw() }, "Draw")));
    if (this.data) host.append(this.#picture(), this.#foot());
  }

  draw() {
    const { app } = this;
    return app.busy("Reading genes", async () => {
      if (!app.geneSet.length) throw new Error("Paste names of genes first.");
      const groups = await this.#groups();
      const genes = [];
      const unknown = [];
      for (const name of app.geneSet) {
        try {
          genes.push({ name, values: (await app.loadGene(name)).values });
        } catch {
          unknown.push(name);
        }
      }
      const cells = genes.map(({ values }) => groups.map(({ rows }) => summary(values, rows)));
      this.data = { genes: genes.map(({ name }) => name), groups, cells, unknown };
      app.drawer.refresh();
    });
  }

  async #groups() {
    const { app } = this;
    if (this.by === SETS) return app.sets.all.map(({ name, rows }) => ({ name, rows }));
    const column = await app.load(this.by);
    const groups = column.labels.map((name) => ({ name, rows: [] }));
    for (let i = 0; i < app.n; i++) groups[column.codes[i]].rows.push(i);
    return groups.filter(({ rows }) => rows.length).slice(0, MOST_GROUPS);
  }

  #picture() {
    const { genes, groups, cells } = this.data;
    const colors = ramped("expression", this.app.theme, 64);
    const left = 8 + 6.4 * Math.min(28, Math.max(...groups.map(({ name }) => name.length), 4));
    const top = 16 + 5.2 * Math.max(...genes.map((name) => name.length), 4);
    const svg = draw("svg", { class: "dots", width: left + genes.length * STEP + 60, height: top + groups.length * STEP + 8, role: "img", "aria-label": "Dot plot" });
    const all = Math.max(1e-12, ...cells.flat().map(({ mean }) => mean || 0));
    genes.forEach((name, i) => {
      const x = left + i * STEP + STEP / 2;
      svg.append(draw("text", { transform: `translate(${x + 4} ${top - 8}) rotate(-55)` }, name));
      const high = this.scaled ? Math.max(1e-12, ...cells[i].map(({ mean }) => mean || 0)) : all;
      groups.forEach((group, j) => {
        const { mean, fraction, n } = cells[i][j];
        if (!n) return;
        const y = top + j * STEP + STEP / 2;
        const color = colors[Math.max(0, Math.min(colors.length - 1, Math.round((mean / high) * (colors.length - 1))))];
        const dot = draw("circle", { cx: x, cy: y, r: Math.max(0.8, LARGEST * Math.sqrt(fraction)), fill: color });
        dot.append(draw("title", {}, `${name} in ${group.name}: mean ${short(mean)}, in ${percent(fraction, 1)} of ${count(n)} cells`));
        svg.append(dot);
      });
    });
    groups.forEach(({ name }, j) => svg.append(draw("text", { x: left - 8, y: top + j * STEP + STEP / 2 + 4, "text-anchor": "end" }, name.length > 28 ? `${name.slice(0, 27)}…` : name || "(empty)")));
    return el("div", { class: "scroll" }, svg);
  }

  #foot() {
    const { unknown } = this.data;
    const colors = this.scaled ? "Colour: mean, of each gene's largest." : "Colour: mean.";
    return el("div", { class: "row" },
      el("button", { class: "link", type: "button", onclick: () => this.save() }, "Save as CSV"),
      el("span", { class: "muted" }, `${colors} Area: share of cells above zero. Values as the page shows them.${unknown.length ? ` Not found: ${unknown.join(", ")}.` : ""}`));
  }

  rows() {
    const { genes, groups, cells } = this.data;
    return genes.flatMap((gene, i) => groups.map(({ name }, j) => [gene, name, cells[i][j].mean, cells[i][j].fraction, cells[i][j].n]));
  }

  save() {
    saveFile("dotplot.csv", [csv([["gene", "group", "mean", "fraction", "n_cells"], ...this.rows()])], "text/csv");
  }
}

function summary(values, rows) {
  let sum = 0;
  let positive = 0;
  let n = 0;
  for (const row of rows) {
    const value = values[row];
    if (!Number.isFinite(value)) continue;
    n++;
    sum += value;
    if (value > 0) positive++;
  }
  return { mean: n ? sum / n : Number.NaN, fraction: n ? positive / n : 0, n };
}
