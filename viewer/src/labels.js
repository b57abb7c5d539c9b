// Names of categories on the plot, where most of their points are; the larger ones win where names would touch.

import { el } from "./dom.js";

const SAMPLE = 200_000;
const CELLS = 24;

export class Labels {
  constructor(host, plot) {
    this.host = host;
    this.plot = plot;
    this.shown = true;
    this.items = [];
  }

  set(column) {
    this.items = column && column.kind === "category" ? this.#find(column) : [];
    this.host.replaceChildren(...this.items.map((item) => item.node));
    this.place();
  }

  // The densest spot of each category: the fullest cell of a coarse grid, then the mean of its neighbourhood.
  #find(column) {
    const rows = this.plot.rows;
    const step = Math.max(1, Math.floor(rows.length / SAMPLE));
    const grids = column.labels.map(() => null);
    const cell = (v) => Math.max(0, Math.min(CELLS - 1, Math.floor(((v + 1) / 2) * CELLS)));
    for (let i = 0; i < rows.length; i += step) {
      const code = column.codes[i];
      const grid = (grids[code] ??= new Uint32Array(CELLS * CELLS));
      grid[cell(rows[i][1]) * CELLS + cell(rows[i][0])]++;
    }
    const sums = grids.map((grid) => {
      if (!grid) return null;
      const best = grid.indexOf(grid.reduce((a, b) => (a > b ? a : b), 0));
      return { cx: best % CELLS, cy: Math.floor(best / CELLS), x: 0, y: 0, n: 0 };
    });
    for (let i = 0; i < rows.length; i += step) {
      const sum = sums[column.codes[i]];
      if (!sum || Math.abs(cell(rows[i][0]) - sum.cx) > 1 || Math.abs(cell(rows[i][1]) - sum.cy) > 1) continue;
      sum.x += rows[i][0];
      sum.y += rows[i][1];
      sum.n++;
    }
    const found = sums.flatMap((sum, code) => {
      if (!sum || code === column.missing || column.hidden.has(code)) return [];
      const label = column.labels[code];
      const node = el("span", { class: "label" }, label.length > 28 ? `${label.slice(0, 27)}…` : label);
      return [{ x: sum.x / sum.n, y: sum.y / sum.n, size: column.counts[code], node }];
    });
    return found.sort((a, b) => b.size - a.size).slice(0, 80);
  }

  place() {
    this.host.hidden = !this.shown;
    if (!this.shown) return;
    const taken = [];
    const width = this.host.clientWidth;
    const height = this.host.clientHeight;
    for (const item of this.items) {
      item.width ??= item.node.offsetWidth;
      item.height ??= item.node.offsetHeight;
      const [x, y] = this.plot.project(item.x, item.y);
      const box = [x - item.width / 2 - 3, y - item.height / 2 - 1, x + item.width / 2 + 3, y + item.height / 2 + 1];
      const outside = box[0] < 0 || box[1] < 0 || box[2] > width || box[3] > height;
      const hidden = outside || taken.some((other) => box[0] < other[2] && box[2] > other[0] && box[1] < other[3] && box[3] > other[1]);
      item.node.classList.toggle("away", hidden);
      if (hidden) continue;
      taken.push(box);
      item.node.style.transform = `translate(${(x - item.width / 2).toFixed(1)}px, ${(y - item.height / 2).toFixed(1)}px)`;
    }
  }
}
