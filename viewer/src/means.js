// Means of genes by groups of cells: the server computes them, or they were computed when the file was written.

import { count, csv, el, percent, saveFile, short } from "./dom.js";
import { pack } from "./sets.js";

const SETS = "\u0000sets";
const STRONGEST = 40; // percent of the accent behind the largest mean of a gene

function parseGenes(text) {
  return [...new Set(text.split(/[\s,;]+/).filter(Boolean))];
}

export class MeansTab {
  constructor(app) {
    this.app = app;
    this.title = "Means";
    this.table = null;
  }

  show(host) {
    const { app } = this;
    const { means, served } = app.manifest;
    const groups = Object.keys(means).map((name) => [name, name]);
    if (served) {
      groups.push(...app.columns.filter(({ given }) => given).map(({ name }) => [name, name]));
      if (app.sets.all.length) groups.push([SETS, "kept selections"]);
    }
    const offered = groups.map(([value]) => value);
    this.by = [this.by, app.column?.name, offered[0]].find((name) => offered.includes(name));
    const by = el("select", { "aria-label": "Group by", onchange: () => { this.by = by.value; if (!served) app.drawer.refresh(); } },
      groups.map(([value, text]) => el("option", { value, selected: value === this.by }, text)));
    const choice = el("label", { class: "muted" }, "by ", by);
    if (served) {
      const genes = el("textarea", { rows: 2, placeholder: "Paste names of genes", "aria-label": "Gene set", spellcheck: "false", oninput: () => (app.geneSet = parseGenes(genes.value)) });
      genes.value = app.geneSet.join(" ");
      host.append(el("div", { class: "form top" }, genes, choice, el("button", { class: "button main", type: "button", onclick: () => this.find() }, "Find")));
    } else {
      this.table = means[this.by] ?? null;
      host.append(el("div", { class: "form" }, choice), el("p", { class: "muted" }, "Computed when this page was written; a served page has every gene, and kept selections."));
    }
    if (this.table) host.append(this.#rows());
  }

  find() {
    const { app } = this;
    return app.busy("Reading genes", async () => {
      if (!app.geneSet.length) throw new Error("Paste names of genes first.");
      if (!this.by) throw new Error("There is no column of a few categories, and no kept selection, to group by.");
      this.table = await app.parts.post("means", { scene: app.manifest.scene, genes: app.geneSet, ...(await this.#groups()) });
      app.drawer.refresh();
    });
  }

  // The server knows its own columns; labels given here and kept selections are sent as sets of cells.
  async #groups() {
    const { app, by } = this;
    if (Object.hasOwn(app.manifest.means, by)) return { by };
    if (by === SETS) return { sets: app.sets.all.map(({ name, rows }) => ({ name, rows: pack(rows, app.n) })) };
    const { codes, labels, missing } = await app.load(by);
    const rows = labels.map(() => []);
    codes.forEach((code, row) => rows[code].push(row));
    return { sets: labels.flatMap((name, code) => (code === missing ? [] : [{ name, rows: pack(rows[code], app.n) }])) };
  }

  #rows() {
    const { genes, groups, mean, count_nonzero: found, n_measured: n } = this.table;
    const most = genes.map((_, j) => Math.max(...mean.map((row) => row[j] ?? 0)));
    const tint = (i, j) => (most[j] > 0 ? `color-mix(in srgb, var(--accent) ${((STRONGEST * Math.max(0, mean[i][j])) / most[j]).toFixed(0)}%, transparent)` : "none");
    const cell = (i, j) =>
      el("td", { title: `${genes[j]} in ${groups[i]}: mean of ${count(n[i][j])} cells; ${count(found[i][j])} have another value than zero`, style: { background: tint(i, j) } },
        n[i][j] ? [short(mean[i][j]), " ", el("span", { class: "number" }, percent(found[i][j], n[i][j]))] : "not measured");
    const head = genes.map((name) => el("th", {}, el("button", { type: "button", onclick: () => this.app.colorByGene(name) }, name)));
    const rows = groups.map((name, i) => el("tr", {}, el("td", {}, name || "(empty)"), genes.map((_, j) => cell(i, j))));
    return el("div", {},
      el("div", { class: "row" },
        el("button", { class: "link", type: "button", onclick: () => this.save() }, "Save as CSV"),
        el("span", { class: "muted" }, "Mean of the values that the page shows, and share of cells whose value is not zero.")),
      el("div", { class: "scroll" }, el("table", { class: "ranks" }, el("thead", {}, el("tr", {}, el("th", {}), head)), el("tbody", {}, rows))));
  }

  text() {
    const { genes, groups, mean, count_nonzero: found, n_measured: n } = this.table;
    const lines = genes.flatMap((gene, j) => groups.map((group, i) => [gene, group, mean[i][j] ?? "", found[i][j], n[i][j]]));
    return csv([["gene", "group", "mean", "count_nonzero", "n_measured"], ...lines]);
  }

  save() {
    saveFile("means.csv", [this.text()], "text/csv");
  }
}
