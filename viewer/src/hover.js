// The card beside the pointer: which cell it is, and what is known of it.

import { el, short } from "./dom.js";

const MOST = 9;

export class Hover {
  constructor(host, ring, app) {
    this.host = host;
    this.ring = ring;
    this.app = app;
    this.row = -1;
  }

  async show(row) {
    if (row === this.row && row >= 0 && !this.host.hidden) return;
    this.row = row;
    if (row < 0) {
      this.host.hidden = this.ring.hidden = true;
      return;
    }
    const { app } = this;
    const ids = await app.ids();
    if (row !== this.row) return;
    const facts = [];
    const colors = app.column && app.column.kind === "category" ? app.column.colors(app.theme) : null;
    for (const column of app.described().slice(0, MOST)) {
      const value = column.text(row);
      const text = typeof value === "number" ? short(value) || "none" : value;
      const dot = column === app.column && colors ? el("span", { class: "dot", style: { background: colors[column.codes[row]] } }) : null;
      facts.push(el("dt", {}, column.name), el("dd", {}, dot, text));
    }
    this.host.replaceChildren(el("div", { class: "id" }, ids.get(row)), el("dl", {}, facts));
    this.host.hidden = this.ring.hidden = false;
    this.#place(row);
  }

  // The picture moved.
  follow() {
    if (!this.host.hidden) this.#place(this.row);
  }

  #place(row) {
    const [x, y] = this.app.plot.screen(row) ?? [0, 0];
    const { clientWidth: width, clientHeight: height } = this.host.parentNode;
    const { offsetWidth: w, offsetHeight: h } = this.host;
    const left = x + 16 + w > width ? x - 16 - w : x + 16;
    const top = Math.max(8, Math.min(height - h - 8, y - h / 2));
    const half = Math.max(4, this.app.plot.size / 2 + 3);
    this.ring.style.width = this.ring.style.height = `${2 * half}px`;
    this.ring.style.transform = `translate(${(x - half).toFixed(1)}px, ${(y - half).toFixed(1)}px)`;
    this.host.style.transform = `translate(${Math.max(8, left).toFixed(0)}px, ${top.toFixed(0)}px)`;
  }
}
