// Cells elsewhere that are near the selected ones in an embedding; the server finds them.

import { count, csv, el, saveFile } from "./dom.js";
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
      el("p", { class: "muted" }, rows.length ? `Cells nearest to the ${count(rows.length)} selected ones become a kept selection; those outside this page, a CSV file.` : "Select cells, and their nearest cells elsewhere are found."),
      ...(this.note ? [el("p", {}, this.note)] : []),
      ...(this.elsewhere?.uid.length ? [el("button", { class: "link", type: "button", onclick: () => this.save() }, "Save the cells outside this page as CSV")] : []),
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
      const answer = await app.parts.post("neighbors", { scene: app.manifest.scene, group: pack(group, app.n), among: pack(among, app.n), embedding: this.embedding, k: this.k, other_datasets: this.where === DATASET });
      const rows = unpack(answer.rows, app.n);
      this.elsewhere = answer.elsewhere;
      const drawn = answer.n_asked < answer.n_with_vector ? `Found from ${count(answer.n_asked)} of the ${count(answer.n_with_vector)} selected cells, drawn by chance. ` : "";
      this.note = drawn + this.describe();
      if (!rows.length) return app.drawer.refresh();
      const set = app.sets.keep(`neighbours ${app.sets.all.filter(({ name }) => name.startsWith("neighbours")).length + 1}`, rows);
      await app.selectRows([...set.rows]);
    });
  }

  // How many of the cells are outside this page, by dataset.
  describe() {
    if (!this.elsewhere) return "A page of a file looks only among the cells that it shows.";
    const counts = new Map();
    for (const name of this.elsewhere.dataset) counts.set(name, (counts.get(name) ?? 0) + 1);
    const parts = [...counts].sort((a, b) => b[1] - a[1]).map(([name, n]) => `${name} ${count(n)}`);
    return `Outside this page: ${count(this.elsewhere.uid.length)}${parts.length ? ` (${parts.join(", ")})` : ""}.`;
  }

  text() {
    const { uid, dataset, distance } = this.elsewhere;
    return csv([["uid", "dataset", "distance"], ...uid.map((id, i) => [id, dataset[i], distance[i]])]);
  }

  save() {
    saveFile("neighbours.csv", [this.text()], "text/csv");
  }
}
