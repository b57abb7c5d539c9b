// Fewer points while the picture moves, where all of them take the machine too long; all of them once it rests.

const FRAME = 24; // milliseconds that a frame may take
const FEW = 40_000; // so many points are always drawn
const REST = 140; // milliseconds without a frame after which all points are drawn
const LONGEST_REST = 900; // where frames are slow, it takes longer to know that none comes
const AGAIN = 1000; // milliseconds after which a frame is timed again
const MOST_STEP = 31; // a stride has at most 255 bytes
const GROWTH = 3; // times as wide at most are the points of a sample, so that it is not faint
const PAIR = 8; // bytes of the two floats by which a point finds its place

export class Detail {
  constructor(gl, redraw) {
    this.gl = gl;
    this.redraw = redraw;
    this.step = 1;
    this.size = 1;
    this.whole = true;
    this.sampled = false;
    this.held = false;
    this.started = 0;
    this.timed = -AGAIN;
    this.last = 0;
    this.pace = 0;
    this.cost = 0;
    this.places = new WeakMap();
    const draw = gl.drawArrays.bind(gl);
    gl.drawArrays = (mode, first, count) => this.#draw(draw, mode, first, count);
    const hold = (held) => () => {
      this.held = held;
      if (!held && this.sampled) this.#settle();
    };
    window.addEventListener("pointerdown", hold(true), true);
    window.addEventListener("pointerup", hold(false), true);
    window.addEventListener("pointercancel", hold(false), true);
    window.addEventListener("blur", hold(false), true);
  }

  // The next frame has all points.
  all() {
    this.whole = true;
  }

  // A frame was drawn.
  drawn() {
    const now = performance.now();
    this.pace = now - this.last;
    this.last = now;
    if (this.sampled) this.#settle();
    else if (this.started && (this.whole || now - this.timed > AGAIN)) this.#measure();
    this.whole = false;
    this.started = 0;
  }

  #settle() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => {
      if (this.held) return;
      this.all();
      this.redraw();
    }, Math.max(REST, Math.min(3 * this.pace, LONGEST_REST)));
  }

  // Wait for the picture: only then is it known what it cost.
  #measure() {
    this.gl.readPixels(0, 0, 1, 1, this.gl.RGBA, this.gl.UNSIGNED_BYTE, new Uint8Array(4));
    this.timed = performance.now();
    this.cost = this.timed - this.started;
    this.step = Math.max(1, Math.min(MOST_STEP, Math.ceil(this.cost / FRAME)));
  }

  #draw(draw, mode, first, count) {
    if (mode !== this.gl.POINTS || count <= FEW) return draw(mode, first, count);
    const grows = !this.started; // the first are the points themselves, what follows lies on selected ones
    this.started ||= performance.now();
    const step = Math.min(this.step, Math.floor(count / FEW));
    const place = step > 1 && !this.whole ? this.#place() : null;
    this.sampled = Boolean(place);
    return place ? this.#every(step, place, grows, () => draw(mode, first, Math.floor(count / step))) : draw(mode, first, count);
  }

  // Where the program takes its points from, if they are pairs of floats one after the other.
  #place() {
    const { gl } = this;
    const program = gl.getParameter(gl.CURRENT_PROGRAM);
    if (!this.places.has(program)) {
      this.places.set(program, { at: gl.getAttribLocation(program, "stateIndex"), extra: gl.getUniformLocation(program, "pointSizeExtra") });
    }
    const place = this.places.get(program);
    const { at, extra } = place;
    const plain =
      at >= 0 &&
      extra &&
      gl.getVertexAttrib(at, gl.VERTEX_ATTRIB_ARRAY_SIZE) === 2 &&
      gl.getVertexAttrib(at, gl.VERTEX_ATTRIB_ARRAY_TYPE) === gl.FLOAT &&
      [0, PAIR].includes(gl.getVertexAttrib(at, gl.VERTEX_ATTRIB_ARRAY_STRIDE)) &&
      gl.getVertexAttribOffset(at, gl.VERTEX_ATTRIB_ARRAY_POINTER) === 0;
    return plain ? place : null;
  }

  // Every so manyth point in the order of drawing, so that layers keep their shares and their order.
  #every(step, { at, extra }, grows, draw) {
    const { gl } = this;
    const bound = gl.getParameter(gl.ARRAY_BUFFER_BINDING);
    gl.bindBuffer(gl.ARRAY_BUFFER, gl.getVertexAttrib(at, gl.VERTEX_ATTRIB_ARRAY_BUFFER_BINDING));
    gl.vertexAttribPointer(at, 2, gl.FLOAT, false, PAIR * step, 0);
    if (grows) gl.uniform1f(extra, this.size * window.devicePixelRatio * (Math.min(Math.sqrt(step), GROWTH) - 1));
    draw();
    if (grows) gl.uniform1f(extra, 0);
    gl.vertexAttribPointer(at, 2, gl.FLOAT, false, 0, 0);
    gl.bindBuffer(gl.ARRAY_BUFFER, bound);
  }
}
