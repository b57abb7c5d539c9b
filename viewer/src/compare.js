// Two selections compared by differential expression, over all genes of the server.

import { count, csv, el, percent, saveFile, short } from "./dom.js";
import { pack } from "./sets.js";

const SHOWN = 200;
const TOP = 10;
const COLUMNS = ["names", "ids", "scores", "logfoldchanges", "pvals", "pvals_adj", "pct_nz_group", "pct_nz_reference"];
const HEADS = { names: "gene", scores: "score", logfoldchanges: "log2 fold", pvals: "p", pvals_adj: "adjusted p", pct_nz_group: "in first", pct_nz_reference: "in second" };

export class CompareTab {
  constructor(app) {
    this.app = app;
    this.title = "Compare";
    this.result = null;
    this.sort = "scores";
    this.down = true;
  }

  show(host) {
    const { app } = this;
    const sides = app.drawer.sides();
    const choose = (name, others, start) => {
      const select = el("select", { "aria-label": name, onchange: () => (this[name] = select.value) }, [...sides, ...others].map(([value, text]) => el("option", { value }, text)));
      const values = [...sides, ...others].map(([value]) => value);
      select.value = values.includes(this[name]) ? this[name] : values[start] ?? "";
      this[name] = select.value;
      return select;
    };
    const method = el("select", { "aria-label": "method", onchange: (event) => (this.method = event.target.value) },
      [["t-test", "Welch's t-test"], ["wilcoxon", "Wilcoxon rank sum"]].map(([value, text]) => el("option", { value, selected: value === this.method }, text)));
    this.method = method.value;
    const run = el("button", { class: "button main", type: "button", onclick: () => this.run() }, "Compare");
    host.append(
      el("div", { class: "form" }, choose("group", [], 0), el("span", { class: "muted" }, "against"), choose("reference", [["rest", "all other cells"]], sides.length), method, run),
      el("p", { class: "muted" }, this.#says()),
    );
    if (this.result) host.append(this.#table());
  }

  #says() {
    const { result } = this;
    if (!result) return "All genes are compared by the server: log1p of counts per 10,000 where there are counts, else the values as they are.";
    return `${count(result.table.names.length)} genes, ${count(result.n_group)} against ${count(result.n_reference)} cells, ${result.values}. p-values adjusted by Benjamini and Hochberg.`;
  }

  run() {
    const { app } = this;
    return app.busy("Comparing", async () => {
      const group = app.drawer.rowsOf(this.group);
      const reference = this.reference === "rest" ? app.without(group) : app.drawer.rowsOf(this.reference);
      this.result = await app.parts.post("compare", { scene: app.manifest.scene, group: pack(group, app.n), reference: pack(reference, app.n), method: this.method });
      app.drawer.refresh();
    });
  }

  #order() {
    const values = this.result.table[this.sort];
    const rows = [...values.keys()];
    const sign = this.down ? -1 : 1;
    return rows.sort((i, j) => (typeof values[i] === "string" ? sign * values[i].localeCompare(values[j]) : sign * ((values[i] ?? -Infinity) - (values[j] ?? -Infinity)) || i - j));
  }

  #table() {
    const { table } = this.result;
    const heads = Object.entries(HEADS).map(([name, text]) =>
      el("th", { "aria-sort": this.sort !== name ? "none" : this.down ? "descending" : "ascending" },
        el("button", { type: "button", onclick: () => this.#by(name) }, text)));
    const cells = (i) => [
      el("td", {}, el("button", { class: "link", type: "button", onclick: () => this.app.colorByGene(table.names[i]) }, table.names[i])),
      ...["scores", "logfoldchanges"].map((name) => el("td", {}, (table[name][i] ?? Number.NaN).toFixed?.(2))),
      ...["pvals", "pvals_adj"].map((name) => el("td", {}, table[name][i] ? short(table[name][i]) : "0")),
      ...["pct_nz_group", "pct_nz_reference"].map((name) => el("td", {}, percent(table[name][i], 1))),
    ];
    const rows = this.#order().slice(0, SHOWN).map((i) => el("tr", {}, cells(i)));
    return el("div", {},
      el("div", { class: "row" },
        el("button", { class: "link", type: "button", onclick: () => this.save() }, "Save as CSV"),
        el("button", { class: "link", type: "button", onclick: () => this.#means() }, `Means of the first ${TOP}`),
        rows.length < table.names.length ? el("span", { class: "muted" }, `the first ${SHOWN} are listed; the file has all`) : null),
      el("div", { class: "scroll" }, el("table", { class: "ranks" }, el("thead", {}, el("tr", {}, heads)), el("tbody", {}, rows))));
  }

  #by(name) {
    this.down = this.sort === name ? !this.down : !["names", "pvals", "pvals_adj"].includes(name);
    this.sort = name;
    this.app.drawer.refresh();
  }

  #means() {
    const { drawer } = this.app;
    this.app.geneSet = this.#order().slice(0, TOP).map((i) => this.result.table.names[i]);
    drawer.open("Means");
    return drawer.tabs.Means.find();
  }

  text() {
    const { table } = this.result;
    const names = COLUMNS.filter((name) => name in table);
    return csv([names, ...table.names.map((_, i) => names.map((name) => table[name][i] ?? ""))]);
  }

  save() {
    saveFile("comparison.csv", [this.text()], "text/csv");
  }
}
