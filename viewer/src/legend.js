// The legend: categories with their counts, or a scale with a histogram and a range.

import { SCALES, ramped } from "./colors.js";
import { count, el, percent, short } from "./dom.js";

const MANY = 14;

export class Legend {
  constructor(host, app) {
    this.host = host;
    this.app = app;
  }

  show(column) {
    this.column = column;
    this.host.replaceChildren();
    if (!column) return;
    if (column.kind === "category") this.#categories(column);
    else this.#scale(column);
  }

  #categories(column) {
    const colors = column.colors(this.app.theme);
    const present = [...column.labels.keys()].filter((code) => column.counts[code] > 0);
    const rows = new Map();
    const list = el("ul", { class: "categories" });
    for (const code of present) {
      const row = el(
        "button",
        {
          class: "category",
          type: "button",
          title: `${column.labels[code]}: ${count(column.counts[code])} cells (${percent(column.counts[code], column.n)})`,
          "aria-pressed": String(!column.hidden.has(code)),
          onclick: (event) => this.#pick(column, code, present, event.metaKey || event.ctrlKey || event.shiftKey),
        },
        el("span", { class: "dot", style: { background: colors[code] } }),
        el("span", { class: "name" }, column.labels[code] === "" ? "(empty)" : column.labels[code]),
        el("span", { class: "number" }, count(column.counts[code])),
      );
      rows.set(code, row);
      list.append(el("li", {}, row));
    }
    this.rows = rows;
    const foot = el("div", { class: "row foot" });
    this.foot = foot;
    const parts = [];
    if (present.length > MANY) {
      const keep = (event) => {
        const wanted = event.target.value.toLowerCase();
        for (const [code, row] of rows) row.parentNode.hidden = !column.labels[code].toLowerCase().includes(wanted);
      };
      parts.push(el("input", { class: "filter", type: "search", placeholder: `Filter ${present.length} values`, "aria-label": "Filter values", oninput: keep }));
    }
    this.host.append(...parts, list, foot, ...(column.named ? [this.#palette(column)] : []));
    this.#mark(column);
  }

  #palette(column) {
    const change = (event) => this.app.setSafe(!event.target.checked);
    const own = el("input", { type: "checkbox", checked: column.own, onchange: change });
    const title = "Without: a palette that red-blind and green-blind eyes can tell apart too";
    return el("label", { class: "check", title }, own, "colours of the data");
  }

  // A click shows one alone, a click with a modifier takes one in or out; the last one shown brings all back.
  #pick(column, code, present, adding) {
    const shown = present.filter((other) => !column.hidden.has(other));
    if (adding) {
      if (column.hidden.has(code)) column.hidden.delete(code);
      else if (shown.length > 1) column.hidden.add(code);
      else column.hidden.clear();
    } else if (shown.length === 1 && shown[0] === code) column.hidden.clear();
    else column.hidden = new Set(present.filter((other) => other !== code));
    this.#mark(column);
    this.app.repaint();
  }

  #mark(column) {
    for (const [code, row] of this.rows) {
      row.classList.toggle("off", column.hidden.has(code));
      row.setAttribute("aria-pressed", String(!column.hidden.has(code)));
    }
    this.foot.replaceChildren();
    if (!column.hidden.size) return;
    let n = 0;
    for (const [code] of this.rows) if (!column.hidden.has(code)) n += column.counts[code];
    this.foot.append(
      el("span", { class: "muted" }, `${count(n)} of ${count(column.n)} cells shown`),
      el("button", { class: "link", type: "button", onclick: () => this.app.selectShown() }, "Select"),
      el("button", { class: "link", type: "button", onclick: () => this.#all(column) }, "Show all"),
    );
  }

  #all(column) {
    column.hidden.clear();
    this.#mark(column);
    this.app.repaint();
  }

  #scale(column) {
    if (!column.known) {
      this.host.append(el("p", { class: "muted" }, "No cell has a value."));
      return;
    }
    const colors = ramped(column.scale, this.app.theme, column.bins.length);
    const inner = [...column.bins].slice(column.expression ? 1 : 0);
    const top = Math.max(1, ...inner);
    const bars = el(
      "div",
      { class: "bars", "aria-hidden": "true" },
      [...column.bins].map((n, i) =>
        el("span", { style: { background: colors[i], height: `${n ? Math.max(4, Math.min(100, (100 * n) / top)) : 0}%` } }),
      ),
    );
    const band = el("div", { class: "band", style: { background: `linear-gradient(to right, ${colors.join(",")})` } });
    const [low, high] = column.domain;
    const marks = el("div", { class: "ticks" });
    const foot = el("div", { class: "row foot" });
    const tell = () => {
      const [from, to] = column.range ?? column.domain;
      const least = column.range ? "" : column.shown(column.min) < low ? "≤ " : "";
      const most = column.range ? "" : column.shown(column.max) > high ? "≥ " : "";
      marks.replaceChildren(
        el("span", {}, least + short(column.unshown(from))),
        el("span", {}, most + short(column.unshown(to))),
      );
      if (!column.range) foot.replaceChildren();
      else if (!foot.childNodes.length) {
        foot.append(
          el("span", { class: "muted" }, "Part of the range"),
          el("button", { class: "link", type: "button", onclick: () => this.app.selectShown() }, "Select"),
          el("button", { class: "link", type: "button", onclick: () => this.#again(column, () => (column.range = null)) }, "Show all"),
        );
      }
    };
    tell();
    const nodes = [el("div", { class: "scale" }, bars, band, this.#handles(column, tell)), marks, foot, this.#choices(column), this.#facts(column)];
    this.host.append(...nodes.filter(Boolean));
  }

  #handles(column, tell) {
    const [low, high] = column.domain;
    const steps = 200;
    const [from, to] = column.range ?? column.domain;
    const at = (value) => Math.round(((value - low) / (high - low)) * steps);
    const make = (value, label) => el("input", { type: "range", min: "0", max: String(steps), value: String(at(value)), "aria-label": label });
    const a = make(from, "Lowest value shown");
    const b = make(to, "Highest value shown");
    const change = () => {
      const [x, y] = [Number(a.value), Number(b.value)].sort((p, q) => p - q);
      const value = (step) => low + (step / steps) * (high - low);
      column.range = x === 0 && y === steps ? null : [x === 0 ? -Infinity : value(x), y === steps ? Infinity : value(y)];
      const shown = column.range && [value(x), value(y)];
      const kept = column.range;
      column.range = shown;
      tell();
      column.range = kept;
      this.app.repaintSoon();
    };
    a.addEventListener("input", change);
    b.addEventListener("input", change);
    return el("div", { class: "handles" }, a, b);
  }

  #choices(column) {
    const scales = el(
      "select",
      { "aria-label": "Colour scale", onchange: (event) => this.#again(column, () => column.setScale(event.target.value)) },
      SCALES.map((name) => el("option", { value: name, selected: name === column.scale }, name)),
    );
    const log = el("input", { type: "checkbox", checked: column.log, onchange: (event) => this.#again(column, () => column.setLog(event.target.checked)) });
    return el("div", { class: "row" }, scales, column.min >= 0 ? el("label", { class: "check" }, log, "log scale") : null);
  }

  #facts(column) {
    const facts = [];
    if (column.known < column.n) facts.push(`${count(column.n - column.known)} cells have no value`);
    if (column.expression && column.min >= 0) {
      let positive = 0;
      for (const value of column.values) if (value > 0) positive++;
      facts.push(`found in ${percent(positive, column.known)} of cells`);
    }
    return facts.length ? el("p", { class: "muted" }, `${facts.join(", ")}.`) : null;
  }

  #again(column, change) {
    change();
    this.show(column);
    this.app.repaint();
  }
}
