// Palettes, and how values become codes of a palette: what a category or a number is drawn in.

import { CATEGORICAL } from "./palette.js";

export const LEVELS = 96;

const SEQUENTIAL = {
  viridis: ["#440154", "#482475", "#414487", "#355f8d", "#2a788e", "#21918c", "#22a884", "#44bf70", "#7ad151", "#bddf26", "#fde725"],
  cividis: ["#00224e", "#083370", "#35456c", "#4f576c", "#666970", "#7d7c78", "#948e77", "#aea371", "#c8b866", "#e5cf52", "#fee838"],
  inferno: ["#1b0c41", "#320a5e", "#4a0c6b", "#781c6d", "#a52c60", "#cf4446", "#ed6925", "#fb9b06", "#f7d13d", "#fcffa4"],
};

const THEMED = {
  light: {
    expression: ["#dcdde2", "#c3cbe2", "#9db1de", "#7590d6", "#5a6ccb", "#4a47b5", "#3a2491", "#260a62"],
    diverging: ["#0b4f9c", "#3c82c4", "#8db9dd", "#dfe1e4", "#e7ad86", "#c96a2d", "#8f3a05"],
    missing: "#d3d5da",
    dimmed: "#e9eaee",
    background: "#ffffff",
    one: "#3d6fb6",
  },
  dark: {
    expression: ["#3d414c", "#3b4b72", "#3a5c9c", "#3f7cc0", "#4aa0cf", "#6cc6c9", "#aee5b5", "#f6fbc0"],
    diverging: ["#6db3f2", "#4b84bd", "#3b5a7d", "#3a3d46", "#7a5436", "#bb7a3f", "#f5ab5d"],
    missing: "#4a4d57",
    dimmed: "#2a2c34",
    background: "#14151a",
    one: "#6fa8f0",
  },
};

export const SCALES = ["expression", "viridis", "cividis", "inferno", "diverging"];

export function themed(theme) {
  return THEMED[theme];
}

function stops(scale, theme) {
  return SEQUENTIAL[scale] ?? THEMED[theme][scale];
}

function channels(hex) {
  return [1, 3, 5].map((at) => Number.parseInt(hex.slice(at, at + 2), 16));
}

function ramp(colors, n) {
  const points = colors.map(channels);
  return Array.from({ length: n }, (_, i) => {
    const at = (i / Math.max(n - 1, 1)) * (points.length - 1);
    const low = Math.min(Math.floor(at), points.length - 2);
    const mixed = points[low].map((c, k) => Math.round(c + (at - low) * (points[low + 1][k] - c)));
    return `#${mixed.map((c) => c.toString(16).padStart(2, "0")).join("")}`;
  });
}

export function ramped(scale, theme, n = LEVELS) {
  return ramp(stops(scale, theme), n);
}

export function categoryColors(labels, given = {}) {
  let next = 0;
  return labels.map((label) => (Object.hasOwn(given, label) ? given[label] : CATEGORICAL[next++ % CATEGORICAL.length]));
}
