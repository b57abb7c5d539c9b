// The drawing: regl-scatterplot with one code per point, an index into a list of colours.

import createScatterplot, { createRegl, createRenderer } from "regl-scatterplot";

import { themed } from "./colors.js";
import { Detail } from "./detail.js";
import { Picker } from "./picker.js";

const MARGIN = 0.94;
const FADED = 0.25; // of the opacity, where categories are drawn
const RIM = 2; // pixels
const REACH = 5; // pixels between the pointer and the rim of a point

// As large as the plot and not as the window. Points come from a buffer of their own, so the canvas has no edges to smooth.
function makeRenderer(width, height) {
  const canvas = document.createElement("canvas");
  canvas.getContext("webgl", { antialias: false, preserveDrawingBuffer: true });
  const renderer = createRenderer({ canvas, regl: createRegl(canvas) });
  renderer.resize(width, height);
  renderer.refresh();
  return renderer;
}

export class Plot {
  constructor(canvas, host, theme) {
    this.host = host;
    this.canvas = canvas;
    this.rows = [];
    this.order = null;
    this.picker = null;
    this.size = 3;
    this.queue = Promise.resolve();
    this.listeners = { view: [], hover: [], select: [] };
    this.#point();
    const { width, height } = host.getBoundingClientRect();
    this.renderer = makeRenderer(Math.max(width, 2), Math.max(height, 2));
    this.scatter = createScatterplot({
      canvas,
      renderer: this.renderer,
      width: Math.max(width, 2),
      height: Math.max(height, 2),
      backgroundColor: themed(theme).background,
      pointSize: 3,
      pointSizeSelected: 1,
      pointOutlineWidth: 0,
      pointScaleMode: "asinh",
      opacityInactiveScale: FADED,
      lassoColor: themed(theme).one,
      lassoMinDelay: 8,
      lassoMinDist: 3,
      actionKeyMap: { lasso: "shift", merge: "cmd", remove: "alt" },
      deselectOnDblClick: false,
      spatialIndexUseWorker: false,
      showReticle: false,
      syncEvents: true,
      antiAliasing: 0.6,
    });
    this.scatter.subscribe("view", () => this.#tell("view"));
    this.detail = new Detail(this.renderer.regl._gl, () => this.scatter.redraw());
    this.scatter.subscribe("draw", () => {
      this.detail.drawn();
      this.#tell("view");
    });
    this.scatter.subscribe("select", ({ points }) => this.#tell("select", points));
    this.scatter.subscribe("deselect", () => this.#tell("select", []));
    new ResizeObserver(() => this.resize()).observe(host);
    const away = () => canvas.dispatchEvent(new MouseEvent("mouseleave"));
    window.addEventListener("blur", away);
    away();
  }

  // The library would draw everything again for each point that the pointer passes; it is told that the pointer is elsewhere.
  #point() {
    const { canvas } = this;
    let pending = null;
    const find = (event) => {
      if (pending === null) requestAnimationFrame(() => {
        const { offsetX, offsetY, buttons } = pending;
        pending = null;
        this.#tell("hover", buttons ? -1 : this.pick(offsetX, offsetY));
      });
      pending = event;
    };
    const leave = (event) => {
      if (!event.isTrusted) return;
      event.stopImmediatePropagation();
      this.#tell("hover", -1);
    };
    canvas.addEventListener("mousemove", find);
    canvas.addEventListener("mousedown", find);
    canvas.addEventListener("mouseenter", (event) => event.stopImmediatePropagation(), true);
    canvas.addEventListener("mouseleave", leave, true);
  }

  // The row nearest to a place on the canvas in CSS pixels, or -1.
  pick(left, top) {
    this.picker ??= new Picker(this.rows);
    const { clientWidth: width, clientHeight: height } = this.canvas;
    const [a, b, , , c, d, , , , , , , e, f] = this.scatter.get("camera").view;
    const gx = ((left / width) * 2 - 1) * (width / height) - e;
    const gy = 1 - (top / height) * 2 - f;
    const whole = a * d - b * c;
    const pixels = (Math.sqrt(Math.abs(whole)) * height) / 2;
    return this.picker.nearest((d * gx - c * gy) / whole, (a * gy - b * gx) / whole, (REACH + this.size / 2) / pixels);
  }

  on(name, call) {
    this.listeners[name].push(call);
  }

  #tell(name, ...given) {
    for (const call of this.listeners[name]) call(...given);
  }

  // Whole numbers of two axes, each over its own range, become [-1, 1] with one scale for both.
  place(xs, ys, [x0, x1, y0, y1]) {
    const n = xs.length;
    const full = 65535;
    const width = x1 - x0;
    const height = y1 - y0;
    const half = Math.max(width, height, Number.MIN_VALUE) / 2;
    this.extent = [width / 2 / half, height / 2 / half];
    this.toData = (x, y) => [x * half + (x0 + x1) / 2, y * half + (y0 + y1) / 2];
    this.fromData = (x, y) => [(x - (x0 + x1) / 2) / half, (y - (y0 + y1) / 2) / half];
    const a = width / full / half;
    const b = height / full / half;
    const left = -width / 2 / half;
    const low = -height / 2 / half;
    this.rows = new Array(n);
    this.picker = null;
    for (let i = 0; i < n; i++) this.rows[i] = [xs[i] * a + left, ys[i] * b + low, 0];
  }

  // Draw in the colours of a palette; `order` lists rows from the bottom to the top, null leaves them as they are.
  // A scale is read by its lightness, so that cells outside of a selection keep theirs, and those inside have a rim instead.
  paint(codes, palette, order, { scale = false } = {}) {
    return this.#next(async () => {
      const rows = this.rows;
      for (let i = 0; i < rows.length; i++) rows[i][2] = codes[i];
      const colors = palette.length > 1 ? palette : [palette[0], palette[0]];
      const look = { opacityInactiveScale: scale ? 1 : FADED, pointOutlineWidth: scale ? RIM : 0 };
      const settings = { ...look, colorBy: "valueA", pointColor: colors, pointColorActive: colors, pointColorHover: colors };
      if (order !== this.order) settings.pointOrder = order;
      this.order = order;
      const spatialIndex = this.index;
      const chosen = this.scatter.get("selectedPoints");
      this.scatter.set(settings);
      this.detail.all();
      await this.scatter.draw(rows, { zDataType: "categorical", spatialIndex });
      this.index ??= this.scatter.get("spatialIndex");
      if (chosen.length) this.scatter.select(chosen, { preventEvent: true });
    });
  }

  #next(step) {
    this.queue = this.queue.then(step, step);
    return this.queue;
  }

  select(rows) {
    if (rows.length) this.scatter.select(rows);
    else this.scatter.deselect();
  }

  lasso(vertices) {
    this.scatter.lassoSelect(vertices.map(([x, y]) => this.fromData(x, y)), { isGl: true });
  }

  zoomTo(rows) {
    return this.scatter.zoomToPoints(rows, { padding: 0.25, transition: true, transitionDuration: this.still ? 0 : 450 });
  }

  zoomBy(factor) {
    const target = this.scatter.get("cameraTarget");
    const distance = this.scatter.get("cameraDistance") / factor;
    return this.scatter.zoomToLocation([target[0], target[1]], distance, { transition: !this.still, transitionDuration: 180 });
  }

  fit({ transition = !this.still } = {}) {
    const [x, y] = this.extent;
    const aspect = this.canvas.clientWidth / Math.max(this.canvas.clientHeight, 1);
    const distance = Math.max(y, x / aspect, 0.05) / MARGIN;
    return this.scatter.zoomToLocation([0, 0], distance, { transition, transitionDuration: 350 });
  }

  // Where the camera looks, and from how far.
  camera() {
    const target = this.scatter.get("cameraTarget");
    return [target[0], target[1], this.scatter.get("cameraDistance")];
  }

  lookAt([x, y, distance]) {
    return this.scatter.zoomToLocation([x, y], distance, { transition: false });
  }

  mode(name) {
    this.scatter.set({ mouseMode: name === "lasso" ? "lasso" : "panZoom" });
    this.canvas.classList.toggle("lassoing", name === "lasso");
  }

  look({ size, opacity, theme, grow }) {
    const settings = {};
    if (grow !== undefined) settings.pointSizeSelected = grow;
    if (size !== undefined) this.size = this.detail.size = settings.pointSize = size;
    if (opacity !== undefined) settings.opacity = opacity;
    if (theme !== undefined) Object.assign(settings, { backgroundColor: themed(theme).background, lassoColor: themed(theme).one });
    this.scatter.set(settings);
  }

  screen(row) {
    return this.scatter.getScreenPosition(row);
  }

  resize() {
    const { width, height } = this.host.getBoundingClientRect();
    if (width <= 1 || height <= 1) return;
    this.renderer.resize(width, height);
    this.renderer.refresh();
    this.detail.all();
    this.scatter.set({ width, height });
  }

  // Draw all points now, and say when it is done.
  drawn() {
    this.detail.all();
    return new Promise((done) => {
      this.scatter.subscribe("draw", done, 1);
      this.scatter.redraw();
    });
  }

  // Where a place in [-1, 1] stands on the canvas, in CSS pixels.
  project(x, y) {
    const width = this.canvas.clientWidth;
    const height = this.canvas.clientHeight;
    const view = this.scatter.get("camera").view;
    const aspect = width / height;
    const gx = (view[0] * x + view[4] * y + view[12]) / aspect;
    const gy = view[1] * x + view[5] * y + view[13];
    return [(gx + 1) * 0.5 * width, (1 - gy) * 0.5 * height];
  }

  async image() {
    await this.drawn();
    const drawn = this.scatter.export();
    const canvas = document.createElement("canvas");
    canvas.width = drawn.width;
    canvas.height = drawn.height;
    const context = canvas.getContext("2d");
    context.putImageData(drawn, 0, 0);
    return canvas;
  }
}
