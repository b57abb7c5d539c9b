// The page: reads what it is to show, makes the plot and the panel, and answers to `window.viewer`.

import { Category, read, Numbers } from "./coloring.js";
import { themed } from "./colors.js";
import { chunk, Parts, Texts } from "./data.js";
import { copyText, count, debounce, el, ICONS, icon, saveFile } from "./dom.js";
import { Hover } from "./hover.js";
import { Labels } from "./labels.js";
import { Legend } from "./legend.js";
import { Drawer } from "./drawer.js";
import { fragment, restore } from "./link.js";
import { Plot } from "./plot.js";
import { Search } from "./search.js";
import { Selection } from "./selection.js";
import { Sets } from "./sets.js";

const NOTHING = "";
const GENE = "gene:";
const COLUMN = "column:";

class App {
  constructor(manifest) {
    this.manifest = manifest;
    this.n = manifest.n;
    this.columns = manifest.columns;
    this.parts = new Parts(manifest);
    this.read = new Map();
    this.genes = new Map();
    this.column = null;
    this.safe = false;
    this.geneSet = [];
    const dark = window.matchMedia("(prefers-color-scheme: dark)").matches;
    this.theme = manifest.theme ?? (dark ? "dark" : "light");
    this.repaintSoon = debounce(60, () => this.repaint());
  }

  async start() {
    this.#build();
    document.documentElement.dataset.theme = this.theme;
    this.plot = new Plot(this.nodes.canvas, this.nodes.stage, this.theme);
    this.plot.still = window.matchMedia("(prefers-reduced-motion: reduce)").matches;
    this.legend = new Legend(this.nodes.legend, this);
    this.selection = new Selection(this.nodes.selection, this);
    this.sets = new Sets(this.nodes.sets, this);
    this.drawer = new Drawer(this.nodes.drawer, this);
    this.labels = new Labels(this.nodes.labels, this.plot);
    this.hover = new Hover(this.nodes.hover, this.nodes.ring, this);
    this.search = new Search(this, this.nodes.search, this.nodes.hits);
    const points = await this.parts.table("points");
    this.plot.place(chunk(points, "x").values, chunk(points, "y").values, this.manifest.bounds);
    this.size = Math.max(0.8, Math.min(8, 90 / Math.sqrt(this.n) ** 0.72));
    this.opacity = Math.max(0.35, Math.min(0.9, 1.25 - 0.13 * Math.log10(this.n)));
    this.plot.look({ size: this.size, opacity: this.opacity, grow: this.n < 20_000 ? 1 : 0 });
    this.nodes.size.value = String(this.size);
    this.nodes.opacity.value = String(this.opacity);
    this.selection.set([]);
    // The first picture has its final colours, so that nothing changes while somebody looks at it.
    const { color } = this.manifest;
    const named = this.columns.some((spec) => spec.name === color);
    await (color ? (named ? this.colorBy(color) : this.colorByGene(color)) : this.paint(null));
    await this.plot.fit({ transition: false });
    this.labels.set(this.column);
    this.#listen();
    await this.follow();
    window.addEventListener("hashchange", () => this.follow());
    document.body.classList.add("ready");
    this.ids().catch((error) => this.say(error.message));
  }

  // ---- what there is -------------------------------------------------------------------------------------------------

  async load(name) {
    const spec = this.columns.find((other) => other.name === name);
    if (!spec) throw new Error(`There is no column ${name}.`);
    if (!this.read.has(name)) this.read.set(name, this.parts.table(spec.key).then((table) => read(spec, table)));
    const column = await this.read.get(name);
    if (column.kind === "category") column.own = column.named && !this.safe;
    this.ready ??= new Map();
    this.ready.set(name, column);
    return column;
  }

  loadedCategories() {
    return [...(this.ready ?? new Map()).values()].filter((column) => column instanceof Category);
  }

  described() {
    const first = this.column ? [this.column] : [];
    return [...first, ...[...(this.ready ?? new Map()).values()].filter((column) => column !== this.column)];
  }

  async ids() {
    this.idTexts ??= this.parts.table("ids").then((table) => {
      const data = chunk(table);
      return this.manifest.hex ? Texts.fromHex(data, this.manifest.hex) : new Texts(data);
    });
    return this.idTexts;
  }

  async texts() {
    const found = [["id", await this.ids()]];
    for (const spec of this.columns.filter((other) => other.kind === "text")) {
      found.push([spec.name, (await this.load(spec.name)).texts]);
    }
    return found;
  }

  async findGenes(text, most) {
    if (this.manifest.served) {
      if (!this.manifest.genes_served) return [];
      return this.parts.json(`genes?q=${encodeURIComponent(text)}&most=${most}`);
    }
    const lower = text.toLowerCase();
    return this.manifest.genes.filter((gene) => gene.name.toLowerCase().includes(lower)).slice(0, most);
  }

  // ---- colour --------------------------------------------------------------------------------------------------------

  async colorBy(name) {
    if (!name) return this.paint(null);
    return this.busy(`Reading ${name}`, async () => this.paint(await this.load(name)), () => this.paint(this.column));
  }

  async loadGene(name) {
    if (!this.genes.has(name)) {
      const known = this.manifest.genes.find((gene) => gene.name === name);
      if (!known && !this.manifest.genes_served) throw new Error(`The page has no values of ${name}.`);
      const table = await (known ? this.parts.table(known.key) : this.parts.table("gene", `?name=${encodeURIComponent(name)}`));
      this.genes.set(name, new Numbers({ name, kind: "number" }, chunk(table), { expression: true }));
      this.#offer();
    }
    return this.genes.get(name);
  }

  async colorByGene(name) {
    return this.busy(`Reading ${name}`, async () => this.paint(await this.loadGene(name)), () => this.paint(this.column));
  }

  // Take the palette that colour-blind eyes can read instead of the colours of the data, or these again.
  setSafe(safe) {
    this.safe = safe;
    for (const column of this.loadedCategories()) column.own = column.named && !safe;
    this.nodes.safe.setAttribute("aria-pressed", String(safe));
    return this.paint(this.column);
  }

  hide(labels) {
    const { column } = this;
    column.hidden = new Set([...column.labels.keys()].filter((code) => labels.includes(column.labels[code])));
    this.legend.show(column);
    return this.repaint();
  }

  // Labels given on this page are a column like any other.
  addLabels(column, given) {
    const name = this.manifest.columns.some((spec) => spec.name === column && !spec.given) ? `${column} (given here)` : column;
    const labels = [...new Set(given.values())];
    const codes = new Uint16Array(this.n).fill(labels.length);
    for (const [row, label] of given) codes[row] = labels.indexOf(label);
    const spec = { name, kind: "category", missing: true, colors: {}, given: true };
    if (!this.columns.some((other) => other.name === name)) this.columns.push(spec);
    this.read.set(name, Promise.resolve(new Category(spec, { values: codes, dictionary: [...labels, ""], length: this.n })));
    this.#offer();
    return this.colorBy(name);
  }

  // ---- the link ------------------------------------------------------------------------------------------------------

  async link() {
    const text = await fragment(this);
    this.own = `#${text}`;
    window.location.replace(this.own);
    return window.location.href;
  }

  follow() {
    const text = window.location.hash;
    if (text.length < 2 || text === this.own) return Promise.resolve();
    return this.busy("Opening the link", () => restore(this, text.slice(1)));
  }

  async paint(column) {
    this.column = column;
    const gene = column && this.genes.get(column.name) === column;
    this.nodes.by.value = column ? (gene ? GENE : COLUMN) + column.name : NOTHING;
    this.legend.show(column);
    this.selection.show();
    await this.repaint();
  }

  async repaint() {
    const { column } = this;
    const one = { codes: new Uint8Array(this.n), palette: [themed(this.theme).one], order: null };
    const { codes, palette, order } = column ? column.painted(this.theme) : one;
    await this.plot.paint(codes, palette, order, { scale: column?.kind === "number" });
    this.labels.set(column);
  }

  // ---- selection -----------------------------------------------------------------------------------------------------

  selectRows(rows, { zoom = false, rule = null } = {}) {
    this.plot.select(rows);
    this.selection.set(rows, rule);
    if (zoom && rows.length) return this.plot.zoomTo(rows);
    return Promise.resolve();
  }

  selectCategory(column, code) {
    const rows = [];
    for (let i = 0; i < this.n; i++) if (column.codes[i] === code) rows.push(i);
    return this.selectRows(rows, { zoom: true, rule: this.#rule(column, [column.labels[code]]) });
  }

  without(rows) {
    const away = new Set(rows);
    return Array.from({ length: this.n }, (_, i) => i).filter((row) => !away.has(row));
  }

  selectShown() {
    const rows = [];
    for (let i = 0; i < this.n; i++) if (this.column.passes(i)) rows.push(i);
    const { column } = this;
    return this.selectRows(rows, { rule: this.#rule(column, column.labels?.filter((_, code) => !column.hidden.has(code))) });
  }

  #rule(column, labels) {
    if (column.spec.given) return null;
    if (column.kind === "category") return { name: column.name, labels };
    const ends = (value) => (Number.isFinite(value) ? value : null);
    return { name: column.name, gene: this.genes.get(column.name) === column, log: column.log, low: ends(column.range?.[0] ?? -Infinity), high: ends(column.range?.[1] ?? Infinity) };
  }

  // ---- the page ------------------------------------------------------------------------------------------------------

  async busy(what, work, mend = () => {}) {
    const timer = setTimeout(() => this.say(`${what} …`), 250);
    try {
      await work();
      clearTimeout(timer);
      this.say(this.done ?? "");
      this.done = null;
    } catch (error) {
      clearTimeout(timer);
      this.say(error.message);
      await mend();
    }
  }

  say(text) {
    this.nodes.status.textContent = text;
    this.nodes.status.hidden = !text;
  }

  setTheme(theme) {
    this.theme = theme;
    document.documentElement.dataset.theme = theme;
    this.plot.look({ theme });
    return this.paint(this.column);
  }

  setMode(mode) {
    this.mode = mode;
    this.plot.mode(mode);
    this.nodes.pan.setAttribute("aria-pressed", String(mode !== "lasso"));
    this.nodes.lasso.setAttribute("aria-pressed", String(mode === "lasso"));
  }

  setLabels(shown) {
    this.labels.shown = shown;
    this.nodes.names.setAttribute("aria-pressed", String(shown));
    this.labels.place();
  }

  async saveImage() {
    const canvas = await this.plot.image();
    const context = canvas.getContext("2d");
    context.globalCompositeOperation = "destination-over";
    context.fillStyle = themed(this.theme).background;
    context.fillRect(0, 0, canvas.width, canvas.height);
    canvas.toBlob((blob) => saveFile("cells.png", [blob], "image/png"), "image/png");
  }

  #listen() {
    const { plot } = this;
    plot.on("view", () => {
      this.labels.place();
      this.hover.follow();
    });
    plot.on("hover", (row) => this.hover.show(row));
    plot.on("select", (rows) => this.selection.set(rows));
    document.addEventListener("keydown", (event) => {
      if (event.target.matches("input, select, textarea") || event.metaKey || event.ctrlKey || event.altKey) return;
      const keys = {
        l: () => this.setMode(this.mode === "lasso" ? "pan" : "lasso"),
        r: () => plot.fit(),
        n: () => this.setLabels(!this.labels.shown),
        d: () => this.setTheme(this.theme === "dark" ? "light" : "dark"),
        c: () => this.setSafe(!this.safe),
        a: () => this.drawer.toggle(),
        "+": () => plot.zoomBy(1.6),
        "-": () => plot.zoomBy(1 / 1.6),
        "/": () => this.nodes.search.focus(),
        Escape: () => this.selectRows([]),
      };
      if (!(event.key in keys)) return;
      event.preventDefault();
      keys[event.key]();
    });
  }

  #offer() {
    const by = this.nodes.by;
    const { value } = by;
    const group = (label, options) => (options.length ? el("optgroup", { label }, options) : null);
    const option = (prefix) => (name) => el("option", { value: prefix + name }, name);
    const of = (kind) => this.columns.filter((spec) => spec.kind === kind).map((spec) => spec.name);
    const genes = [...new Set([...this.manifest.genes.map((gene) => gene.name), ...this.genes.keys()])];
    by.replaceChildren(
      ...[
        el("option", { value: NOTHING }, "Nothing"),
        group("Annotations", of("category").map(option(COLUMN))),
        group("Measures", of("number").map(option(COLUMN))),
        group("Genes", genes.map(option(GENE))),
      ].filter(Boolean),
    );
    by.value = value;
  }

  #tool(name, title, paths, run, pressed) {
    const button = el("button", { class: "tool", type: "button", title, "aria-label": title, "aria-pressed": pressed, onclick: run }, icon(...paths));
    this.nodes[name] = button;
    return button;
  }

  #toolbar() {
    const sliders = el(
      "div",
      { class: "popover", hidden: true },
      el("label", {}, "Point size", (this.nodes.size = el("input", { type: "range", min: "0.4", max: "12", step: "0.1", oninput: (e) => this.plot.look({ size: Number(e.target.value) }) }))),
      el("label", {}, "Opacity", (this.nodes.opacity = el("input", { type: "range", min: "0.05", max: "1", step: "0.01", oninput: (e) => this.plot.look({ opacity: Number(e.target.value) }) }))),
    );
    const toggle = () => (sliders.hidden = !sliders.hidden);
    return el(
      "div",
      { class: "toolbar", role: "toolbar", "aria-label": "View" },
      el("div", { class: "tools" },
        this.#tool("pan", "Move and zoom", ICONS.pan, () => this.setMode("pan"), "true"),
        this.#tool("lasso", "Lasso (L)", ICONS.lasso, () => this.setMode("lasso"), "false")),
      el("div", { class: "tools" },
        this.#tool("in", "Zoom in (+)", ICONS.plus, () => this.plot.zoomBy(1.6)),
        this.#tool("out", "Zoom out (−)", ICONS.minus, () => this.plot.zoomBy(1 / 1.6)),
        this.#tool("fit", "Show all (R)", ICONS.fit, () => this.plot.fit())),
      el("div", { class: "tools" },
        this.#tool("names", "Names on the plot (N)", ICONS.labels, () => this.setLabels(!this.labels.shown), "true"),
        this.#tool("look", "Point size and opacity", ICONS.sliders, toggle),
        this.#tool("dark", "Light or dark (D)", ICONS.theme, () => this.setTheme(this.theme === "dark" ? "light" : "dark")),
        this.#tool("safe", "Palette for colour-blind eyes (C)", ICONS.safe, () => this.setSafe(!this.safe), "false"),
        this.#tool("save", "Save the picture", ICONS.image, () => this.saveImage())),
      el("div", { class: "tools" },
        this.#tool("analyse", "Counts, comparison, means, labels (A)", ICONS.analyse, () => this.drawer.toggle(), "false"),
        this.#tool("linked", "Copy a link to this state", ICONS.link, () => this.busy("Writing the link", async () => {
          await copyText(await this.link());
          this.done = "The link is copied.";
        }))),
      sliders,
    );
  }

  #build() {
    const { manifest } = this;
    const nodes = (this.nodes = {});
    document.title = manifest.title;
    nodes.canvas = el("canvas", { id: "canvas", "aria-label": `Scatter plot of ${count(this.n)} cells` });
    nodes.labels = el("div", { class: "labels", "aria-hidden": "true" });
    nodes.hover = el("div", { class: "hover", hidden: true });
    nodes.ring = el("div", { class: "ring", hidden: true });
    nodes.status = el("div", { class: "status", role: "status", hidden: true });
    nodes.stage = el("div", { class: "stage" }, nodes.canvas, nodes.labels, nodes.ring, nodes.hover);
    nodes.search = el("input", { type: "search", placeholder: this.#finds(), "aria-label": "Search", role: "combobox", "aria-expanded": "false", "aria-controls": "hits", autocomplete: "off", spellcheck: "false" });
    nodes.hits = el("div", { class: "hits", id: "hits", role: "listbox", hidden: true });
    nodes.by = el("select", { id: "by", onchange: () => this.#chosen(nodes.by.value) });
    nodes.legend = el("div", { class: "legend" });
    nodes.selection = el("section", { class: "selection" });
    nodes.sets = el("section", { class: "kept" });
    nodes.drawer = el("section", { class: "drawer", hidden: true, "aria-label": "Analysis" });
    const notes = manifest.notes.map((note) => el("p", { class: "note" }, note));
    // The data parts stand in the body too, until they are read.
    document.body.prepend(
      el("main", {}, nodes.stage, this.#toolbar(), nodes.status, nodes.drawer),
      el(
        "aside",
        {},
        el("header", {}, el("h1", { title: manifest.title }, manifest.title), el("p", { class: "muted" }, this.#subtitle()), notes),
        el("div", { class: "search" }, icon(...ICONS.search), nodes.search, nodes.hits),
        el("section", { class: "coloring" }, el("label", { class: "by", for: "by" }, "Colour by"), nodes.by, nodes.legend),
        nodes.selection,
        nodes.sets,
      ),
    );
    this.#offer();
  }

  #finds() {
    return this.manifest.genes.length || this.manifest.genes_served ? "Search genes, values, cells" : "Search values, cells";
  }

  #subtitle() {
    const { n, n_total: total, subtitle } = this.manifest;
    const cells = n < total ? `${count(n)} of ${count(total)} cells, sampled` : `${count(n)} cells`;
    return subtitle ? `${cells} · ${subtitle}` : cells;
  }

  #chosen(value) {
    if (value.startsWith(GENE)) return this.colorByGene(value.slice(GENE.length));
    return this.colorBy(value.slice(COLUMN.length));
  }
}

// What scripts and tests may call; coordinates are those of the data.
function offered(app) {
  return {
    colorBy: (name) => app.colorBy(name),
    colorByGene: (name) => app.colorByGene(name),
    lasso: (vertices) => {
      app.plot.lasso(vertices);
      return app.selection.ids();
    },
    select: async (ids) => {
      const wanted = new Set(ids);
      const texts = await app.ids();
      const rows = [];
      for (let i = 0; i < app.n; i++) if (wanted.has(texts.get(i))) rows.push(i);
      await app.selectRows(rows);
      return rows.length;
    },
    selection: () => app.selection.ids(),
    clear: () => app.selectRows([]),
    search: async (text) => (await app.search.find(text)).map(({ group, title, note, rows }) => ({ group, title, note, n: rows?.length })),
    choose: async (text, i = 0) => (await app.search.find(text))[i].run(),
    hover: (row) => app.hover.show(row),
    legend: () => legendOf(app),
    hide: (labels) => app.hide(labels),
    keep: (name) => app.sets.keep(name, app.selection.rows, app.selection.rule).rows.length,
    sets: () => app.sets.all.map(({ name, rows }) => ({ name, n: rows.length })),
    compare: async (group, reference = "rest", method = "t-test") => {
      await app.drawer.open("Compare");
      Object.assign(app.drawer.tabs.Compare, { group, reference, method });
      await app.drawer.tabs.Compare.run();
      return app.drawer.tabs.Compare.result;
    },
    link: () => app.link(),
    open: (title) => app.drawer.open(title),
    drawn: () => app.plot.drawn(),
    theme: (name) => app.setTheme(name),
    state: () => ({ n: app.n, theme: app.theme, color: app.column?.name ?? null, status: app.nodes.status.textContent }),
    app,
  };
}

function legendOf({ column, theme }) {
  if (!column) return null;
  if (column.kind !== "category") return { name: column.name, domain: column.domain, log: column.log, known: column.known };
  const colors = column.colors(theme);
  return column.labels.map((label, code) => ({ label, n: column.counts[code], color: colors[code], hidden: column.hidden.has(code) }));
}

async function open() {
  const manifest = JSON.parse(document.getElementById("manifest").textContent);
  const app = new App(manifest);
  window.viewer = offered(app);
  await app.start();
}

window.viewerOpened = open().then(
  () => true,
  (error) => {
    const gl = document.createElement("canvas").getContext("webgl");
    const why = gl ? error.message : "This page draws with WebGL, which this browser does not offer; switch hardware acceleration on.";
    document.body.replaceChildren(el("p", { class: "failed", role: "alert" }, `The page cannot be shown. ${why}`));
    document.body.classList.add("ready");
    throw error;
  },
);
