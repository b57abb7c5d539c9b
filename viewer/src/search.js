// One field for everything that has a name: columns, genes, categories and cells.

import { count, debounce, el } from "./dom.js";

const FEW = 6;

export class Search {
  constructor(app, input, list) {
    Object.assign(this, { app, input, list, active: -1, hits: [] });
    input.addEventListener("input", debounce(90, () => this.show(input.value)));
    input.addEventListener("focus", () => input.value && this.show(input.value));
    input.addEventListener("keydown", (event) => this.#key(event));
    document.addEventListener("pointerdown", (event) => {
      if (!list.contains(event.target) && event.target !== input) this.close();
    });
  }

  // Everything that a text finds, in groups; each hit has a title, a note and what it does.
  async find(text) {
    const { app } = this;
    const wanted = text.trim();
    if (!wanted) return [];
    const lower = wanted.toLowerCase();
    const has = (name) => name.toLowerCase().includes(lower);
    const hits = [];
    for (const spec of app.columns.filter((spec) => spec.kind !== "text" && has(spec.name)).slice(0, FEW)) {
      hits.push({ group: "Colour by", title: spec.name, note: spec.kind === "category" ? "annotation" : "measure", run: () => app.colorBy(spec.name) });
    }
    for (const gene of await app.findGenes(wanted, FEW)) {
      hits.push({ group: "Genes", title: gene.name, note: gene.note ?? "", run: () => app.colorByGene(gene.name) });
    }
    for (const column of app.loadedCategories()) {
      const codes = [...column.labels.keys()].filter((code) => column.counts[code] && has(column.labels[code])).slice(0, FEW);
      for (const code of codes) {
        hits.push({ group: column.name, title: column.labels[code], note: `${count(column.counts[code])} cells`, run: () => app.selectCategory(column, code) });
      }
    }
    hits.push(...(await this.#cells(wanted)));
    return hits;
  }

  async #cells(wanted) {
    const hits = [];
    for (const [name, texts] of await this.app.texts()) {
      const rows = texts.find(wanted);
      if (!rows.length) continue;
      if (rows.length > 1) {
        hits.push({ group: `Cells by ${name}`, title: `All ${count(rows.length)} with “${wanted}”`, note: "select", rows, run: () => this.app.selectRows(rows, { zoom: true }) });
      }
      for (const row of rows.slice(0, 4)) {
        hits.push({ group: `Cells by ${name}`, title: texts.get(row), note: "", rows: [row], run: () => this.app.selectRows([row], { zoom: true }) });
      }
    }
    return hits;
  }

  async show(text) {
    const turn = (this.turn = (this.turn ?? 0) + 1);
    let hits = [];
    let trouble = "";
    try {
      hits = await this.find(text);
    } catch (error) {
      trouble = error.message;
    }
    if (turn !== this.turn) return;
    this.hits = hits;
    this.active = hits.length ? 0 : -1;
    const nodes = [];
    let group = null;
    hits.forEach((hit, i) => {
      if (hit.group !== group) nodes.push(el("div", { class: "group" }, (group = hit.group)));
      hit.node = el(
        "button",
        { class: "hit", type: "button", role: "option", id: `hit-${i}`, onclick: () => this.run(hit) },
        el("span", { class: "name" }, hit.title),
        el("span", { class: "number" }, hit.note),
      );
      nodes.push(hit.node);
    });
    if (text.trim() && !hits.length) nodes.push(el("div", { class: "nothing" }, trouble || "Nothing has this name."));
    this.list.replaceChildren(...nodes);
    this.list.hidden = !nodes.length;
    this.input.setAttribute("aria-expanded", String(nodes.length > 0));
    this.#mark();
  }

  run(hit) {
    this.close();
    this.input.value = "";
    this.input.blur();
    return hit.run();
  }

  close() {
    this.turn = (this.turn ?? 0) + 1;
    this.list.hidden = true;
    this.input.setAttribute("aria-expanded", "false");
  }

  #mark() {
    this.hits.forEach((hit, i) => {
      hit.node.classList.toggle("active", i === this.active);
      hit.node.setAttribute("aria-selected", String(i === this.active));
    });
    const node = this.hits[this.active]?.node;
    if (node) {
      this.input.setAttribute("aria-activedescendant", node.id);
      node.scrollIntoView({ block: "nearest" });
    }
  }

  #key(event) {
    const moves = { ArrowDown: 1, ArrowUp: -1 };
    if (event.key in moves && this.hits.length) {
      this.active = (this.active + moves[event.key] + this.hits.length) % this.hits.length;
      this.#mark();
      event.preventDefault();
    } else if (event.key === "Enter" && this.hits[this.active]) {
      this.run(this.hits[this.active]);
    } else if (event.key === "Escape") {
      this.close();
      this.input.blur();
    }
  }
}
