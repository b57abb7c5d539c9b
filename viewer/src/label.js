// A label for the selected cells: an annotation, saved as a file that `annotate` takes or written by the server.

import { count, csv, el, saveFile } from "./dom.js";
import { pack } from "./sets.js";

export class LabelTab {
  constructor(app) {
    this.app = app;
    this.title = "Label";
    this.column = "label";
    this.labels = new Map();
  }

  show(host) {
    const { app } = this;
    const { rows } = app.selection;
    const writes = app.manifest.allow_annotate;
    const column = el("input", { type: "text", value: this.column, maxlength: "200", "aria-label": "Column", oninput: () => (this.column = column.value) });
    const label = el("input", { type: "text", placeholder: "e.g. naive B cells", maxlength: "200", "aria-label": "Label" });
    const give = el("button", { class: "button main", type: "button", disabled: !rows.length, onclick: () => this.give(column.value, label.value) },
      writes ? "Write to the atlas" : "Label");
    label.addEventListener("keydown", (event) => event.key === "Enter" && give.click());
    const replace = el("input", { type: "checkbox", checked: this.replace, onchange: (event) => (this.replace = event.target.checked) });
    host.append(
      el("p", { class: "muted" }, rows.length ? `The label is given to the ${count(rows.length)} selected cells.` : "Select cells to label them."),
      el("div", { class: "form" }, el("label", { class: "muted" }, "column ", column), el("label", { class: "muted" }, "label ", label), give,
        writes ? el("label", { class: "check" }, replace, "replace other labels") : null),
      el("p", { class: "muted" }, writes ? "Written by annotate, with this page's snapshot as its origin; queries see it after the next snapshot." : "Labels are kept in this page until they are saved; atlas.annotate takes the file as it is."),
    );
    const lists = [...this.labels].map(([name, given]) => el("div", { class: "row" }, el("span", {}, `${name}: ${count(given.size)} cells`),
      el("button", { class: "link", type: "button", onclick: () => this.save(name) }, "Save as CSV")));
    host.append(...lists);
  }

  give(column, label) {
    const { app } = this;
    const rows = [...app.selection.rows];
    return app.busy("Labelling", async () => {
      const [name, text] = [column.trim(), label.trim()];
      if (!name || !text) throw new Error("Write the name of a column and a label.");
      if (!rows.length) throw new Error("Select cells first.");
      if (app.manifest.allow_annotate) {
        await app.parts.post("annotate", { scene: app.manifest.scene, group: pack(rows, app.n), column: name, label: text, on_conflict: this.replace ? "replace" : "error" });
      }
      this.column = name;
      const given = this.labels.get(name) ?? new Map();
      for (const row of rows) given.set(row, text);
      this.labels.set(name, given);
      app.sets.keep(text, rows, app.selection.rule);
      await app.addLabels(name, given);
      app.done = app.manifest.allow_annotate ? `Wrote ${text} for ${count(rows.length)} cells.` : "";
    });
  }

  async text(name) {
    const ids = await this.app.ids();
    const column = this.app.manifest.hex ? "uid" : "cell_name";
    return csv([[column, name], ...[...this.labels.get(name)].sort((a, b) => a[0] - b[0]).map(([row, label]) => [ids.get(row), label])]);
  }

  async save(name) {
    saveFile(`${name.replace(/[^\w-]+/g, "_")}.csv`, [await this.text(name)], "text/csv");
  }
}
