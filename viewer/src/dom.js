// Elements are made by calls and filled by textContent only, so that no name or value of the data is ever read as HTML.

const SVG = "http://www.w3.org/2000/svg";

export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.className = value;
    else if (name === "style") Object.assign(node.style, value);
    else if (name in node && typeof value !== "string") node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export function icon(...paths) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 20 20");
  svg.setAttribute("aria-hidden", "true");
  svg.classList.add("icon");
  for (const d of paths) {
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("d", d);
    svg.append(path);
  }
  return svg;
}

export const ICONS = {
  pan: ["M10 2v16M2 10h16M10 2 7.8 4.2M10 2l2.2 2.2M10 18l-2.2-2.2M10 18l2.2-2.2M2 10l2.2-2.2M2 10l2.2 2.2M18 10l-2.2-2.2M18 10l-2.2 2.2"],
  lasso: ["M7.2 13.1C4.600 12.500 2.800 10.700 2.800 8.500 2.800 5.500 6 3 10 3s7.200 2.500 7.200 5.500-3.200 5.500-7.200 5.500c-.5 0-1 0-1.500-.1", "M7.200 15.300a1.700 1.700 0 1 0 0-3.400 1.700 1.700 0 0 0 0 3.400c.4 1-.1 2-1.200 2.700"],
  plus: ["M10 4v12M4 10h12"],
  minus: ["M4 10h12"],
  fit: ["M3 7V4a1 1 0 0 1 1-1h3M13 3h3a1 1 0 0 1 1 1v3M17 13v3a1 1 0 0 1-1 1h-3M7 17H4a1 1 0 0 1-1-1v-3"],
  labels: ["M4 6V4h12v2M10 4v12M7.500 16h5"],
  sliders: ["M3 6h7M14 6h3M3 14h3M10 14h7", "M12 8a2 2 0 1 0 0-4 2 2 0 0 0 0 4", "M8 16a2 2 0 1 0 0-4 2 2 0 0 0 0 4"],
  theme: ["M10 3a7 7 0 1 0 0 14 7 7 0 0 0 0-14", "M10 3v14M10 6l4.500-1M10 9.500h6.900M10 13l6-.2M10 16.500l2.500-.2"],
  image: ["M4 4h12a1 1 0 0 1 1 1v10a1 1 0 0 1-1 1H4a1 1 0 0 1-1-1V5a1 1 0 0 1 1-1", "M3.500 14.500 8 10l3 3 2.500-2.500 3 3M13 7.500h.01"],
  search: ["M9 15A6 6 0 1 0 9 3a6 6 0 0 0 0 12M13.500 13.500 17.500 17.500"],
  analyse: ["M3 17h14M5 14v-4M9 14V5M13 14V8M17 14v-2"],
  link: ["M8.500 11.500a3 3 0 0 0 4.200 0l2.600-2.600a3 3 0 0 0-4.200-4.200l-1 1M11.500 8.500a3 3 0 0 0-4.200 0l-2.600 2.600a3 3 0 0 0 4.200 4.200l1-1"],
  safe: ["M2.500 10S5 5 10 5s7.500 5 7.500 5-2.500 5-7.500 5-7.500-5-7.500-5", "M10 12.200a2.200 2.200 0 1 0 0-4.400 2.200 2.200 0 0 0 0 4.400"],
  close: ["M5 5l10 10M15 5 5 15"],
};

export function debounce(milliseconds, call) {
  let timer = 0;
  return (...given) => {
    clearTimeout(timer);
    timer = setTimeout(() => call(...given), milliseconds);
  };
}

export function saveFile(name, parts, type) {
  const url = URL.createObjectURL(new Blob(parts, { type }));
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

export function csv(rows) {
  const quoted = (value) => (typeof value === "number" || value === "" ? String(value) : `"${String(value ?? "").replaceAll('"', '""')}"`);
  return rows.map((row) => row.map(quoted).join(",")).join("\n") + "\n";
}

export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return;
  } catch {
    const area = el("textarea", { class: "offscreen", "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

const whole = new Intl.NumberFormat("en-US");

export function count(n) {
  return whole.format(n);
}

export function short(value) {
  if (!Number.isFinite(value)) return "";
  if (value < 0) return `\u2212${short(-value)}`;
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return whole.format(value);
  if (value !== 0 && (value >= 1e6 || value < 1e-3)) return value.toExponential(1).replace("e+", "e");
  if (value >= 1000) return whole.format(Math.round(value));
  return String(Number(value.toPrecision(3)));
}

export function percent(part, all) {
  const share = (100 * part) / Math.max(all, 1);
  return share > 0 && share < 0.1 ? "<0.1%" : `${share.toFixed(share < 10 ? 1 : 0)}%`;
}
