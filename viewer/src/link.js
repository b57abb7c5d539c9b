// The state of the page as a link: colour, selections, gene set, camera and palette, in the part after "#".

import { compress, decompress, rowsOfRule } from "./sets.js";

const LONGEST = 4_000_000;
const MOST_GENES = 200;

async function write(set, n) {
  return JSON.stringify(set.rule ? { name: set.name, rule: set.rule } : { name: set.name, bits: await compress(set.rows, n) });
}

async function read(text, app) {
  const { name, rule, bits } = JSON.parse(text);
  const rows = rule ? await rowsOfRule(rule, app) : await decompress(String(bits), app.n);
  return { name: String(name ?? ""), rows, rule: rule ?? null };
}

export async function fragment(app) {
  const { column, selection, manifest } = app;
  const state = new URLSearchParams({ v: "1", scene: manifest.scene, theme: app.theme });
  // Columns of labels given on this page are not on another one.
  if (column && !column.spec.given) state.set(app.genes.get(column.name) === column ? "gene" : "color", column.name);
  if (column?.kind === "category" && !column.spec.given && column.hidden.size) state.set("hide", JSON.stringify([...column.hidden].map((code) => column.labels[code])));
  if (app.safe) state.set("safe", "1");
  if (app.geneSet.length) state.set("genes", JSON.stringify(app.geneSet));
  state.set("camera", app.plot.camera().map((value) => String(Number(value.toPrecision(7)))).join(","));
  for (const set of app.sets.all) state.append("set", await write(set, app.n));
  if (selection.rows.length) state.set("selected", await write({ name: "", rows: selection.rows, rule: selection.rule }, app.n));
  return state.toString();
}

// Bring the page into the state of a link; what it does not have is said, and changes nothing.
export async function restore(app, text) {
  if (!text) return;
  if (text.length > LONGEST) throw new Error("The link is too long to be one of this page.");
  const state = new URLSearchParams(text);
  if (state.get("v") !== "1") return;
  if (state.get("scene") !== app.manifest.scene) throw new Error("The link is of a page of other cells, so it is not applied.");
  const sets = await Promise.all(state.getAll("set").map((one) => read(one, app)));
  const selected = state.has("selected") ? await read(state.get("selected"), app) : null;
  const genes = JSON.parse(state.get("genes") ?? "[]");
  if (!Array.isArray(genes)) throw new Error("The link has no list of genes.");
  // Read first, so that a link that names what is not here changes nothing.
  const [gene, color] = [state.get("gene"), state.get("color")];
  if (gene) await app.loadGene(gene);
  else if (color) await app.load(color);
  if (["light", "dark"].includes(state.get("theme"))) await app.setTheme(state.get("theme"));
  await app.setSafe(state.get("safe") === "1");
  await (gene ? app.colorByGene(gene) : app.colorBy(color ?? ""));
  const hidden = JSON.parse(state.get("hide") ?? "[]");
  if (app.column?.kind === "category" && Array.isArray(hidden) && hidden.length) await app.hide(hidden);
  app.sets.all = [];
  for (const { name, rows, rule } of sets) app.sets.keep(name, rows, rule);
  app.geneSet = genes.slice(0, MOST_GENES).map(String);
  await app.selectRows(selected?.rows ?? [], { rule: selected?.rule ?? null });
  const camera = (state.get("camera") ?? "").split(",").map(Number);
  if (camera.length === 3 && camera.every(Number.isFinite) && camera[2] > 0) await app.plot.lookAt(camera);
  app.drawer.refresh();
}
