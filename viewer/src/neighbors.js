// Cells elsewhere that are near the selected ones in an embedding; the server finds them.

import { count, el } from "./dom.js";
import { pack, unpack } from "./sets.js";

const DATASET = "dataset";

export class NeighborsTab {
  constructor(app) {
    this.app = app;
    this.title = "Neighbours";
    this.embedding = app.manifest.embeddings.find((name) => /pca|scvi|emb/i.test(name)) ?? app.manifest.embeddings[0];
    this.k = 15;
    this.where = "rest";
  }

  show(host) {
    const { app } = this;
    const { rows } = app.selection;
    const pick = (name, options) => {
      const select = el("select", { "aria-label": name, onchange: () => (this[name] = select.value) }, options.map(([value, text]) => el("option", { value, selected: value === this[name] }, text)));
      return select;
    };
    const places = [["rest", "all other cells"]];
    if (app.columns.some(({ name, kind }) => name === DATASET && kind === "category")) places.push([DATASET, "other datasets"]);
    const k = el("input", { type: "number", min: "1", max: "200", value: String(this.k), "aria-label": "k", onchange: () => (this.k = Number(k.value)) });
    host.append(
      el("div", { class: "form" }, el("label", { class: "muted" }, "embedding ", pick("embedding", app.manifest.embeddings.map((name) => [name, name]))),
        el("label", { class: "muted" }, "among ", pick("where", places)), el("label", { class: "muted" }, "per cell ", k),
        el("button", { class: "button main", type: "button", disabled: !rows.length, onclick: () => this.find() }, "Find")),
      el("p", { class: "muted" }, rows.length ? `Cells nearest to the ${count(rows.length)} selected ones become a kept selection.` : "Select cells, and their nearest cells elsewhere are found."),
      ...(this.note ? [el("p", {}, this.note)] : []),
    );
  }

  find() {
    const { app } = this;
    return app.busy("Looking for neighbours", async () => {
      const group = [...app.selection.rows];
      let among = app.without(group);
      if (this.where === DATASET) {
        const { codes } = await app.load(DATASET);
        const own = new Set(group.map((row) => codes[row]));
        among = among.filter((row) => !own.has(codes[row]));
      }
      const answer = await app.parts.post("neighbors", { scene: app.manifest.scene, group: pack(group, app.n), among: pack(among, app.n), embedding: this.embedding, k: this.k });
      const rows = unpack(answer.rows, app.n);
      this.note = answer.n_asked < answer.n_with_vector ? `Found from ${count(answer.n_asked)} of the ${count(answer.n_with_vector)} selected cells, drawn by chance.` : "";
      const set = app.sets.keep(`neighbours ${app.sets.all.filter(({ name }) => name.startsWith("neighbours")).length + 1}`, rows);
      await app.selectRows([...set.rows]);
    });
  }
}
