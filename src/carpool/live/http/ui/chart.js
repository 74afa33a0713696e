// Small line charts and bars.

import { svg } from "./dom.js";

// Charts are scaled to their card. On a phone they are drawn smaller, so that their text stays readable.
export const fitting = (width) => Math.min(width, Math.max(300, innerWidth - 60));

const [LEFT, BOTTOM, TOP, RIGHT] = [52, 20, 8, 10];

/**
 * Return a line chart. `points`: `[x, y]` with null for a gap; `steps`: a value holds until the next one.
 * `xText` and `yText` write the ends of the axes.
 */
export function lineChart({ label, points, width = fitting(460), height = 150, low, high, xText, yText, steps = false, mark = null }) {
  const xs = points.map(([at]) => at);
  const [from, to] = [Math.min(...xs), Math.max(...xs)];
  const x = (at) => LEFT + (to > from ? (at - from) / (to - from) : 0.5) * (width - LEFT - RIGHT);
  const y = (value) => TOP + (1 - (Math.min(Math.max(value, low), high) - low) / (high - low)) * (height - TOP - BOTTOM);
  let path = "";
  let before = null;
  for (const [at, value] of points) {
    if (steps && before !== null) path += `H${x(at).toFixed(1)}`;
    if (value !== null) path += `${before === null ? "M" : "L"}${x(at).toFixed(1)} ${y(value).toFixed(1)}`;
    before = value;
  }
  const ticks = [low, (low + high) / 2, high];
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "chart", role: "img", "aria-label": label },
    ticks.map((value) => svg("line", { x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value), class: "grid" })),
    ticks.map((value) => svg("text", { x: LEFT - 6, y: y(value) + 4, class: "axis-text end" }, yText(value))),
    svg("text", { x: LEFT, y: height - 4, class: "axis-text" }, xText(from, (to - from) / 2)),
    svg("text", { x: width - RIGHT, y: height - 4, class: "axis-text end" }, xText(to, (to - from) / 2)),
    mark !== null && mark >= low && mark <= high ? svg("line", { x1: LEFT, x2: width - RIGHT, y1: y(mark), y2: y(mark), class: "mark" }) : null,
    svg("path", { d: path, class: "line" }));
}

/** Return stacked bars: `bars` is a list of lists of `{ value, colour, title }`. */
export function stackedBars({ label, bars, names, width = fitting(1140), height = 200, text }) {
  const most = Math.max(1e-9, ...bars.map((parts) => parts.reduce((sum, part) => sum + part.value, 0)));
  const step = (width - LEFT - RIGHT) / bars.length;
  const every = Math.ceil(52 / step);
  const y = (value) => TOP + (1 - value / most) * (height - TOP - BOTTOM);
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "chart wide", role: "img", "aria-label": label },
    [0, most / 2, most].map((value) => [
      svg("line", { x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value), class: "grid" }),
      svg("text", { x: LEFT - 6, y: y(value) + 4, class: "axis-text end" }, text(value)),
    ]),
    bars.map((parts, index) => {
      let sum = 0;
      const x = LEFT + index * step;
      return [
        parts.map((part) => {
          const top = y(sum + part.value);
          const box = svg("rect", { x: x + step * 0.15, y: top, width: step * 0.7, height: Math.max(0, y(sum) - top), class: part.colour, rx: 2 }, svg("title", {}, part.title));
          sum += part.value;
          return box;
        }),
        index % every ? null : svg("text", { x: x + step / 2, y: height - 4, class: "axis-text middle" }, names[index]),
      ];
    }));
}
