// What the selected cells are, by every column, beside all cells.

import { count, csv, el, percent, saveFile, short } from "./dom.js";

const SHOWN = 8;
const SAVED = 500; // values of a column of texts; the rest is one line

export class CountsTab {
  constructor(app) {
    this.app = app;
    this.title = "Counts";
  }

  async show(host) {
    const { app } = this;
    const { rows } = app.selection;
    if (!rows.length) {
      host.append(el("p", { class: "muted" }, "Select cells, and their counts by every column are listed here."));
      return;
    }
    const bar = el("div", { class: "row" }, el("span", { class: "muted" }, `${count(rows.length)} selected cells; shares of all ${count(app.n)} cells in grey.`),
      el("button", { class: "link", type: "button", onclick: () => this.save() }, "Save as CSV"));
    const cards = el("div", { class: "cards" });
    host.append(bar, cards);
    for (const spec of app.columns) {
      const column = await app.load(spec.name);
      if (app.selection.rows !== rows || !cards.isConnected) return;
      cards.append(el("section", { class: "card" }, el("h2", {}, spec.name), column.kind === "number" ? this.#measure(column, rows) : this.#shares(column, rows)));
    }
  }

  // The most frequent values among the selected cells and, where there are more, how many other values and cells.
  counted(column, rows, most) {
    if (column.kind === "text") return column.counted(rows, most);
    const counts = new Uint32Array(column.labels.length);
    for (const row of rows) counts[column.codes[row]]++;
    const codes = [...counts.keys()].filter((code) => counts[code]).sort((a, b) => counts[b] - counts[a]);
    const found = codes.slice(0, most).map((code) => ({ code, label: column.labels[code], n: counts[code], all: column.counts[code] }));
    return { found, others: codes.length - found.length };
  }

  #shares(column, rows) {
    const { found, others } = this.counted(column, rows, SHOWN);
    if (column.kind === "text" && found[0].n === 1 && rows.length > 1) return [el("p", { class: "muted" }, `${count(rows.length)} different values`)];
    const colors = column.colors?.(this.app.theme);
    const lines = found.map(({ code, label, n, all }) =>
      el("div", { class: "share", title: `${label}: ${count(n)} of ${count(all)}` },
        el("span", { class: "name" }, label || "(empty)"),
        el("span", { class: "number" }, `${count(n)} · ${percent(n, rows.length)}`),
        el("span", { class: "track" },
          el("span", { class: "fill", style: { background: colors?.[code] ?? "var(--accent)", width: `${(100 * n) / rows.length}%` } }),
          el("span", { class: "mark", style: { left: `${(100 * all) / column.n}%` } }))));
    const left = rows.length - found.reduce((sum, { n }) => sum + n, 0);
    const more = `other (${count(others)} ${others === 1 ? "value" : "values"}): ${count(left)} · ${percent(left, rows.length)}`;
    return [...lines, others ? el("p", { class: "muted" }, more) : null].filter(Boolean);
  }

  #measure(column, rows) {
    const facts = [["mean", mean], ["median", median]].flatMap(([name, of]) => [el("dt", {}, name), el("dd", {}, short(of(column.values, rows)) || "none"), el("dd", { class: "muted" }, short(of(column.values, null)) || "none")]);
    return el("dl", { class: "facts" }, el("dt", {}), el("dd", { class: "muted" }, "selected"), el("dd", { class: "muted" }, "all"), facts);
  }

  async text() {
    const lines = [["column", "value", "n_selected", "n_all"]];
    const { rows } = this.app.selection;
    for (const spec of this.app.columns.filter(({ kind }) => kind !== "number")) {
      const column = await this.app.load(spec.name);
      const { found, others } = this.counted(column, rows, column.kind === "text" ? SAVED : Infinity);
      const lacking = (total, key) => total - found.reduce((sum, one) => sum + one[key], 0);
      for (const { label, n, all } of found) lines.push([spec.name, label, n, all]);
      if (others) lines.push([spec.name, `other (${others} values)`, lacking(rows.length, "n"), lacking(column.n, "all")]);
    }
    return csv(lines);
  }

  async save() {
    saveFile("counts.csv", [await this.text()], "text/csv");
  }
}

// Of the rows, or of all cells where there are none.
export function mean(values, rows) {
  let sum = 0;
  let known = 0;
  for (let i = 0; i < (rows ?? values).length; i++) {
    const value = values[rows ? rows[i] : i];
    if (!Number.isFinite(value)) continue;
    sum += value;
    known++;
  }
  return known ? sum / known : Number.NaN;
}

function median(values, rows) {
  const some = (rows ? Float64Array.from(rows, (row) => values[row]) : Float64Array.from(values)).filter(Number.isFinite).sort();
  const half = some.length >> 1;
  return some.length % 2 ? some[half] : (some[half - 1] + some[half]) / 2;
}
