// Which point is under the pointer: a grid over all points, made when it is first asked for.

const A_CELL = 4;
const MOST_CELLS = 1024;

export class Picker {
  constructor(rows) {
    this.rows = rows;
    this.width = Math.max(1, Math.min(MOST_CELLS, Math.ceil(Math.sqrt(rows.length / A_CELL))));
    const cells = Uint32Array.from(rows, ([x, y]) => this.#cell(y) * this.width + this.#cell(x));
    this.starts = new Uint32Array(this.width ** 2 + 1);
    for (const cell of cells) this.starts[cell + 1]++;
    for (let i = 0; i < this.width ** 2; i++) this.starts[i + 1] += this.starts[i];
    const next = this.starts.slice();
    this.order = new Uint32Array(rows.length);
    cells.forEach((cell, row) => (this.order[next[cell]++] = row));
  }

  #cell(value) {
    return Math.max(0, Math.min(this.width - 1, Math.floor(((value + 1) / 2) * this.width)));
  }

  // The nearest row within a radius, or -1.
  nearest(x, y, radius) {
    let best = -1;
    let least = radius * radius;
    for (let j = this.#cell(y - radius); j <= this.#cell(y + radius); j++) {
      const from = this.starts[j * this.width + this.#cell(x - radius)];
      const to = this.starts[j * this.width + this.#cell(x + radius) + 1];
      for (let k = from; k < to; k++) {
        const [px, py] = this.rows[this.order[k]];
        const away = (px - x) ** 2 + (py - y) ** 2;
        if (away <= least) {
          least = away;
          best = this.order[k];
        }
      }
    }
    return best;
  }
}
