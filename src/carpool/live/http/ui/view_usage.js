// Usage: GPU time by user, group or project and by day, and how it adds up to the time of all GPUs.

import { get } from "./api.js";
import { stackedBars } from "./chart.js";
import { el, say, show } from "./dom.js";
import { gpuHours } from "./format.js";
import { COLOURS } from "./timeline.js";

const DAY = 86400;
const COLUMNS = { Held: "held_gpu_s", Computed: "computed_gpu_s", Shared: "shared_gpu_s", Paused: "paused_gpu_s", "Saved by sharing": "saved_gpu_s", "Lost to failures": "lost_gpu_s" };

const dayText = (day) => new Date(day * DAY * 1000).toISOString().slice(0, 10);
const shortDay = (day) => new Date(day * DAY * 1000).toLocaleDateString([], { month: "short", day: "numeric", timeZone: "UTC" });
const named = (value) => (value === "" ? "(none)" : value);

// Rows by user and day, added up by user. What sharing saved is unknown only if it is on all days with sharing.
function addUp(rows, by, days) {
  const found = new Map();
  for (const row of rows) {
    const one = found.get(row[by]) ?? { jobs: 0, failed: 0, known: false, byDay: days.map(() => 0) };
    for (const field of Object.values(COLUMNS)) one[field] = (one[field] ?? 0) + (row[field] ?? 0);
    one.known = one.known || row.saved_gpu_s !== null;
    one.jobs += row.jobs;
    one.failed += row.failed;
    const index = days.indexOf(row.day);
    if (index >= 0) one.byDay[index] += row.held_gpu_s;
    found.set(row[by], one);
  }
  return [...found].sort(([, a], [, b]) => b.held_gpu_s - a.held_gpu_s);
}

export function usageView() {
  const choice = (id, options) => el("select", { id, onchange: () => load() }, options.map(([value, text]) => el("option", { value }, text)));
  const days = choice("days", [7, 14, 30, 90].map((number) => [number, `${number} days`]));
  const by = choice("by", ["user", "group", "project"].map((name) => [name, name]));
  const said = el("p", { class: "problem", role: "alert" });
  const picture = el("div");
  const table = el("div");
  const node = el("section", { class: "card" },
    el("div", { class: "card-head" }, el("h1", {}, "Usage"),
      el("div", { class: "tools" }, el("label", { for: "by" }, "By"), by, el("label", { for: "days" }, "Last"), days)),
    said, picture, table);
  const load = async () => {
    try {
      const last = Math.floor(Date.now() / 1000 / DAY);
      const numbers = Array.from({ length: Number(days.value) }, (_, index) => last - Number(days.value) + 1 + index);
      draw(await get(`/v1/usage?by=${by.value},day&since=${dayText(numbers[0])}`), numbers);
    } catch (error) {
      say(said, error.message);
    }
  };
  const draw = (told, numbers) => {
    const key = told.by[0];
    const rows = addUp(told.rows, key, numbers.map(dayText));
    if (!rows.length) {
      show(picture, el("p", { class: "quiet" }, "No job used a GPU in this time."));
      show(table);
      return;
    }
    const names = numbers.map(shortDay);
    const bars = names.map((name, day) => rows.map(([value, one], index) => ({ value: one.byDay[day] / 3600, colour: `c${index % COLOURS}`, title: `${named(value)}, ${name}: ${gpuHours(one.byDay[day])}` })));
    show(picture, stackedBars({ label: "GPU hours held by day; the table below has the numbers", bars, names, text: (hours) => gpuHours(hours * 3600) }));
    const head = [key[0].toUpperCase() + key.slice(1), ...Object.keys(COLUMNS), "Jobs ended", "Failed"];
    const cell = (text, tone) => el("td", { class: tone }, text);
    const saved = (one) => (one.known ? gpuHours(one.saved_gpu_s) : "unknown");
    const line = ([value, one], index) => el("tr", {},
      el("th", { scope: "row" }, el("span", { class: `dot c${index % COLOURS}` }), " ", named(value)),
      Object.values(COLUMNS).map((field) => (field === "saved_gpu_s" ? cell(saved(one), one.saved_gpu_s < 0 ? "bad" : null) : cell(gpuHours(one[field])))),
      cell(`${one.jobs}`), cell(`${one.failed}`));
    const rest = Object.entries({ Idle: "idle_gpu_s", Closed: "closed_gpu_s", "All GPUs": "existed_gpu_s" }).map(([name, field]) =>
      el("tr", {}, el("th", { scope: "row" }, name), cell(gpuHours(told.gpus[field])), el("td", { colspan: head.length - 2 })));
    show(table, el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `Usage by ${key}` }, el("table", {},
      el("thead", {}, el("tr", {}, head.map((label) => el("th", { scope: "col" }, label)))),
      el("tbody", {}, rows.map(line), rest))));
  };
  load();
  return { node };
}
