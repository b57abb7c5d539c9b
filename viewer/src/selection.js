// The selected cells: how many, what they are, and their ids to copy or save.

import { mean } from "./counts.js";
import { copyText, count, el, percent, saveFile, short } from "./dom.js";

const SHOWN = 6;

export class Selection {
  constructor(host, app) {
    this.host = host;
    this.app = app;
    this.rows = [];
    this.rule = null;
  }

  // A rule says which cells they are without naming each: values of a category, or a range.
  set(rows, rule = null) {
    this.rows = rows;
    this.rule = rule;
    this.show();
    this.app.drawer?.refresh({ typing: true });
  }

  show() {
    const { rows, app } = this;
    if (!rows.length) {
      this.host.replaceChildren(
        el("h2", {}, "Selection"),
        el("p", { class: "muted" }, "Press ", el("kbd", {}, "L"), " or hold ", el("kbd", {}, "Shift"), " and draw around cells."),
      );
      return;
    }
    const name = el("input", { type: "text", placeholder: "Name", maxlength: "200", "aria-label": "Name of the selection" });
    const keep = el("button", { class: "button", type: "button", title: "Keep this selection by name", onclick: () => app.busy("Keeping", async () => app.sets.keep(name.value, rows, this.rule)) }, "Keep");
    name.addEventListener("keydown", (event) => event.key === "Enter" && keep.click());
    const tab = (title) => el("button", { class: "link", type: "button", onclick: () => app.drawer.open(title) }, title);
    const copy = el("button", { class: "button", type: "button", onclick: () => this.copy(copy) }, "Copy ids");
    const nodes = [
      el("h2", {}, "Selection", el("span", { class: "number" }, `${count(rows.length)} ${rows.length === 1 ? "cell" : "cells"} · ${percent(rows.length, app.n)}`)),
      this.#summary(),
      el("div", { class: "row keep" }, name, keep),
      el("div", { class: "row links" }, Object.keys(app.drawer?.tabs ?? {}).map(tab)),
      el(
        "div",
        { class: "row buttons" },
        copy,
        el("button", { class: "button", type: "button", onclick: () => this.save() }, "Save ids"),
        el("button", { class: "button", type: "button", onclick: () => app.plot.zoomTo(rows) }, "Zoom"),
        el("button", { class: "button", type: "button", onclick: () => app.selectRows([]) }, "Clear"),
      ),
    ];
    this.host.replaceChildren(...nodes.filter(Boolean));
  }

  #summary() {
    const column = this.app.column;
    if (!column) return null;
    return column.kind === "category" ? this.#shares(column) : this.#measure(column);
  }

  #shares(column) {
    const counts = new Map();
    for (const row of this.rows) counts.set(column.codes[row], (counts.get(column.codes[row]) ?? 0) + 1);
    const sorted = [...counts].sort((a, b) => b[1] - a[1]);
    const colors = column.colors(this.app.theme);
    const bars = sorted.slice(0, SHOWN).map(([code, n]) =>
      el(
        "div",
        { class: "share", title: `${column.labels[code]}: ${count(n)}` },
        el("span", { class: "name" }, column.labels[code] || "(empty)"),
        el("span", { class: "number" }, percent(n, this.rows.length)),
        el("span", { class: "track" }, el("span", { class: "fill", style: { background: colors[code], width: `${(100 * n) / this.rows.length}%` } })),
      ),
    );
    const left = sorted.length - SHOWN;
    return el("div", { class: "shares" }, bars, left > 0 ? el("p", { class: "muted" }, `and ${left} more`) : null);
  }

  #measure(column) {
    return el(
      "p",
      { class: "muted" },
      `Mean ${column.name} ${short(mean(column.values, this.rows)) || "unknown"}; of all cells ${short(mean(column.values, null)) || "unknown"}.`,
    );
  }

  async ids() {
    const ids = await this.app.ids();
    return Array.from(this.rows, (row) => ids.get(row));
  }

  async copy(button) {
    await copyText((await this.ids()).join("\n"));
    if (!button) return;
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy ids"), 1500);
  }

  async save() {
    saveFile("cells.txt", [(await this.ids()).join("\n"), "\n"], "text/plain");
  }
}
