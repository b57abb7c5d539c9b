// The panel below the map, with a tab for each thing that can be done with selections.

import { CompareTab } from "./compare.js";
import { CountsTab } from "./counts.js";
import { el, icon, ICONS } from "./dom.js";
import { LabelTab } from "./label.js";
import { MeansTab } from "./means.js";
import { NeighborsTab } from "./neighbors.js";

const CURRENT = "\u0000current";

export class Drawer {
  constructor(host, app) {
    this.host = host;
    this.app = app;
    const { compares, embeddings, genes, genes_served: every } = app.manifest;
    const tabs = [new CountsTab(app)];
    if (compares) tabs.push(new CompareTab(app));
    if (every || genes.length) tabs.push(new MeansTab(app));
    tabs.push(new LabelTab(app));
    if (embeddings.length) tabs.push(new NeighborsTab(app));
    this.tabs = Object.fromEntries(tabs.map((tab) => [tab.title, tab]));
    this.current = tabs[0].title;
  }

  open(title = this.current) {
    this.current = title;
    this.host.hidden = false;
    this.host.parentNode.classList.add("open");
    this.app.nodes.analyse.setAttribute("aria-pressed", "true");
    return this.refresh();
  }

  close() {
    this.host.hidden = true;
    this.host.parentNode.classList.remove("open");
    this.app.nodes.analyse.setAttribute("aria-pressed", "false");
  }

  toggle() {
    return this.host.hidden ? this.open() : this.close();
  }

  // What changes outside is drawn again; a field that is being filled is left alone.
  refresh({ typing = false } = {}) {
    if (this.host.hidden || (typing && this.host.contains(document.activeElement))) return Promise.resolve();
    const heads = Object.keys(this.tabs).map((title) =>
      el("button", { class: "tab", type: "button", role: "tab", "aria-selected": String(title === this.current), onclick: () => this.open(title) }, title));
    const body = el("div", { class: "body", role: "tabpanel", "aria-label": this.current });
    this.host.replaceChildren(
      el("div", { class: "tabs", role: "tablist" }, heads, el("button", { class: "drop", type: "button", title: "Close (A)", "aria-label": "Close", onclick: () => this.close() }, icon(...ICONS.close))),
      body,
    );
    return Promise.resolve(this.tabs[this.current].show(body));
  }

  // The selections that a list offers: value and text.
  sides() {
    const { app } = this;
    const current = app.selection.rows.length ? [[CURRENT, "current selection"]] : [];
    return [...current, ...app.sets.all.map(({ name }) => [name, name])];
  }

  rowsOf(value) {
    if (value === CURRENT) return [...this.app.selection.rows];
    const set = this.app.sets.get(value);
    if (!set) throw new Error("Select cells first, or keep a selection.");
    return [...set.rows];
  }
}
