// GPUs as rows over time: which jobs run where, shared parts split, paused ones hatched, what is expected lighter.
// All parts of one colour are one path, so that thousands of them cost little.

import { el, show, svg } from "./dom.js";
import { clock, span } from "./format.js";

export const COLOURS = 12;
const LABEL = 84;
const AXIS = 22;
let pictures = 0;

/**
 * Return periods in which the jobs of a GPU and what they do stay the same: `{ gpu, start, end, jobs, paused, starting }`,
 * from places of jobs. `now` ends the places that last.
 */
export function slices(places, now) {
  const byGpu = new Map();
  for (const place of places) {
    for (const gpu of place.on) {
      if (!byGpu.has(gpu)) byGpu.set(gpu, []);
      byGpu.get(gpu).push(place);
    }
  }
  const found = [];
  for (const [gpu, own] of byGpu) {
    const moments = new Set();
    for (const place of own) moments.add(place.start).add(place.end ?? now);
    const edges = [...moments].sort((a, b) => a - b);
    const sorted = [...own].sort((a, b) => a.start - b.start || Number(a.job) - Number(b.job));
    let first = 0;
    for (let index = 0; index + 1 < edges.length; index++) {
      const [start, end] = [edges[index], edges[index + 1]];
      while (first < sorted.length && (sorted[first].end ?? now) <= start) first++;
      const there = [];
      for (let at = first; at < sorted.length && sorted[at].start < end; at++) if ((sorted[at].end ?? now) >= end) there.push(sorted[at]);
      if (there.length) {
        const named = (kind) => there.filter((one) => one.kind === kind).map((one) => one.job);
        found.push({ gpu, start, end, jobs: there.map((one) => one.job), paused: named("paused"), starting: named("starting") });
      }
    }
  }
  return found;
}

export class Timeline {
  /** `describe(job)` names a job in the line under the pointer; `open(job)` is called when it is clicked. */
  constructor({ label, describe, open }) {
    Object.assign(this, { label, describe, open });
    this.number = ++pictures;
    this.hint = el("div", { class: "hint", "aria-hidden": "true" });
    this.picture = el("div", { class: "timeline" });
    this.node = el("figure", { class: "figure" }, this.picture, this.hint);
    this.picture.addEventListener("pointermove", (event) => this._point(event));
    this.picture.addEventListener("pointerleave", () => (this.hint.textContent = ""));
    this.picture.addEventListener("click", (event) => {
      const found = this._at(event);
      if (found) this.open(found.job);
    });
    this._resize = new ResizeObserver(() => this.data && this.draw(this.data));
    this._resize.observe(this.picture);
  }

  close() {
    this._resize.disconnect();
  }

  /** Draw `{ gpus, slices, from, to, now, ticks }`; `ticks(at, step)` writes a moment below the picture. */
  draw(data) {
    this.data = data;
    const { gpus, from, to, now } = data;
    const width = Math.max(240, this.picture.clientWidth);
    const label = width < 500 ? 62 : LABEL;
    const row = gpus.length <= 8 ? 30 : gpus.length <= 24 ? 20 : gpus.length <= 64 ? 12 : 8;
    const gap = row >= 20 ? 4 : 2;
    const inner = width - label - 8;
    const x = (at) => label + ((Math.min(Math.max(at, from), to) - from) / (to - from)) * inner;
    const rowOf = new Map(gpus.map((gpu, index) => [gpu, index]));
    const paths = new Map();
    const add = (key, x0, y0, w, h) => paths.set(key, `${paths.get(key) ?? ""}M${x0.toFixed(1)} ${y0.toFixed(1)}h${w.toFixed(1)}v${h.toFixed(1)}h${(-w).toFixed(1)}z`);
    this.boxes = [];
    for (const one of data.slices) {
      const index = rowOf.get(one.gpu);
      if (index === undefined || one.end < from || one.start > to) continue;
      const [x0, x1] = [x(one.start), x(one.end)];
      const w = Math.max(0.6, x1 - x0 - (x1 - x0 > 4 ? 0.6 : 0));
      const h = (row - gap) / one.jobs.length;
      one.jobs.forEach((job, lane) => {
        const y = index * row + lane * h;
        const lane_h = Math.max(0.8, h - (one.jobs.length > 1 && h > 4 ? 1 : 0));
        const time = one.start >= now - 0.001 ? "later" : "past";
        const key = `c${Number(job) % COLOURS} ${time}${one.starting?.includes(job) ? " starting" : ""}`;
        add(key, x0, y, w, lane_h);
        if (one.paused.includes(job)) add("hatch", x0, y, w, lane_h);
        this.boxes.push({ x0, x1: x0 + w, y0: y, y1: y + h, job, slice: one });
      });
    }
    const height = gpus.length * row;
    const shapes = [...paths].sort(([a], [b]) => (a === "hatch") - (b === "hatch")).map(([key, d]) =>
      svg("path", key === "hatch" ? { d, fill: `url(#hatch${this.number})`, class: "hatch" } : { d, class: key }));
    show(this.picture, svg("svg", { width, height: height + AXIS, role: "img", "aria-label": this.label },
      svg("defs", {}, svg("pattern", { id: `hatch${this.number}`, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
        svg("rect", { width: 2.4, height: 6, class: "hatch-line" }))),
      gpus.map((gpu, index) => svg("rect", { x: label, y: index * row, width: inner, height: row - gap, class: "track", rx: 2 })),
      this._labels(gpus, row, gap, label),
      this._axis(x, from, to, height, data.ticks ?? clock),
      shapes,
      now > from && now < to ? svg("line", { x1: x(now), x2: x(now), y1: 0, y2: height, class: "now-line" }) : null));
  }

  _labels(gpus, row, gap, label) {
    const every = Math.max(1, Math.ceil(13 / row));
    return gpus.map((gpu, index) => index % every ? null :
      svg("text", { x: label - 8, y: index * row + (row - gap) / 2 + 4, class: "axis-text end" }, shortened(gpu, label)));
  }

  _axis(x, from, to, height, ticks) {
    const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400, 604800];
    const wanted = (to - from) / Math.max(2, Math.floor((x(to) - x(from)) / 90));
    const step = steps.find((one) => one >= wanted) ?? steps.at(-1);
    const marks = [];
    for (let at = Math.ceil(from / step) * step; at <= to; at += step) {
      marks.push(svg("line", { x1: x(at), x2: x(at), y1: 0, y2: height, class: "grid" }));
      const text = ticks(at, step);
      if (x(at) - x(from) > 12 && x(to) - x(at) > 3.5 * text.length) marks.push(svg("text", { x: x(at), y: height + 15, class: "axis-text middle" }, text));
    }
    return marks;
  }

  _at(event) {
    const box = this.picture.getBoundingClientRect();
    const [px, py] = [event.clientX - box.left + this.picture.scrollLeft, event.clientY - box.top + this.picture.scrollTop];
    return (this.boxes ?? []).findLast((one) => px >= one.x0 && px <= one.x1 && py >= one.y0 && py < one.y1);
  }

  _point(event) {
    const found = this._at(event);
    this.picture.classList.toggle("on-job", Boolean(found));
    if (!found) {
      this.hint.textContent = "";
      return;
    }
    const { slice, job } = found;
    const how = slice.paused.includes(job) ? ", paused" : slice.starting?.includes(job) ? ", starting" : "";
    const others = slice.jobs.filter((one) => one !== job).map((one) => this.describe(one));
    const beside = others.length ? `, beside ${others.join(" and ")}` : "";
    this.hint.textContent = `${slice.gpu}: ${this.describe(job)}${how}${beside}, ${span(slice.end - slice.start)}`;
  }
}

function shortened(text, width) {
  const most = Math.floor((width - 10) / 6.4);
  return text.length <= most ? text : `…${text.slice(1 - most)}`;
}
