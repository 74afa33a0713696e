// Now: numbers, GPUs over the last and the next hour, and the head of the queue.

import { bar, chip, el, link, say, show } from "./dom.js";
import { jobs, plural, span, until } from "./format.js";
import { Timeline, slices } from "./timeline.js";

const RANGES = [["1 hour", 3600], ["15 min", 900], ["3 min", 180], ["1 min", 60]];
const SHOWN = 8;
const DRAW_MS = 1000;
const STILL_MS = 10000; // where nothing moves, only the time does
const PAUSED = new Set(["paused", "pausing", "resuming"]);

let chosen = null; // seconds before and after now, as the user chose them; kept while the page is open

// Return the shortest range that shows everything of the last hour: the first minutes of a service would be a sliver.
function fittingRange(places, now) {
  const age = now - Math.min(now, ...places.filter((one) => (one.end ?? now) > now - RANGES[0][1]).map((one) => one.start));
  return age ? RANGES.map(([, seconds]) => seconds).findLast((seconds) => seconds >= age) ?? RANGES[0][1] : RANGES[0][1];
}

export function nowView(store) {
  const ranges = el("select", { id: "range", onchange: () => ((chosen = Number(ranges.value)), draw()) }, RANGES.map(([label, seconds]) => el("option", { value: seconds }, label)));
  const tiles = ["GPUs busy", "GPUs shared", "Running", "Paused", "Waiting", "Next start"].map((label) => {
    const [value, more] = [el("span", { class: "tile-value" }, "–"), el("span", { class: "tile-more" })];
    return { value, more, node: el("div", { class: "tile" }, el("span", { class: "tile-label" }, label), value, more) };
  });
  const describe = (job) => `job ${job} ${store.name(job)}`.trim();
  const timeline = new Timeline({
    label: "Jobs on each GPU in the last time, and lighter what is expected of the next. The table below lists the GPUs.",
    describe,
    open: (job) => (location.hash = `#/job/${job}`),
  });
  const gpuTable = el("tbody");
  const waiting = el("div", { class: "list" });
  const running = el("div", { class: "list" });
  const node = el("div", {},
    el("h1", { class: "sr-only" }, "Now"),
    el("div", { class: "tiles" }, tiles.map((one) => one.node)),
    el("section", { class: "card" },
      el("div", { class: "card-head" }, el("h2", {}, "GPUs"), legend(), el("div", { class: "tools" }, el("label", { for: "range" }, "Last and next"), ranges)),
      timeline.node,
      el("details", {}, el("summary", {}, "As a table"),
        el("table", {}, el("caption", { class: "sr-only" }, "GPUs and the jobs on them now"),
          el("thead", {}, el("tr", {}, ["GPU", "Jobs now"].map((label) => el("th", { scope: "col" }, label)))), gpuTable))),
    el("div", { class: "columns" },
      el("section", { class: "card" }, el("div", { class: "card-head" }, el("h2", {}, "Next in the queue"), link("/jobs", "All jobs")), waiting),
      el("section", { class: "card" }, el("div", { class: "card-head" }, el("h2", {}, "On the GPUs"), link("/history", "Ended jobs")), running)));

  let drawn = 0;
  let later = null;
  let shown = [];
  const drawSoon = () => {
    const news = [store.places, store.forecast];
    if (news.every((one, index) => one === shown[index]) && Date.now() - drawn < STILL_MS) return;
    clearTimeout(later);
    const wait = drawn + DRAW_MS - Date.now();
    if (wait > 0) later = setTimeout(draw, wait);
    else draw();
  };
  const draw = () => {
    drawn = Date.now();
    shown = [store.places, store.forecast];
    const now = store.now();
    const range = chosen ?? fittingRange(store.places, now);
    ranges.value = `${range}`;
    const past = slices(store.places, now);
    const ahead = slices(store.forecast.places.filter((one) => (one.end ?? Infinity) > now).map((one) => ({ ...one, start: Math.max(one.start, now) })), now + range);
    timeline.draw({ gpus: store.gpus, slices: [...past, ...ahead], from: now - range, to: now + range, now });
    drawGpus(past, now);
  };
  const drawGpus = (past, now) => {
    const here = new Map(past.filter((one) => one.end >= now - 0.001).map((one) => [one.gpu, one]));
    const shared = [...here.values()].filter((one) => one.jobs.length - one.paused.length > 1).length;
    say(tiles[0].value, `${here.size} / ${store.gpus.length}`);
    say(tiles[1].value, `${shared}`);
    show(gpuTable, store.gpus.map((gpu) => el("tr", {}, el("th", { scope: "row" }, gpu),
      el("td", {}, (here.get(gpu)?.jobs ?? []).map((job) => [link(`/job/${job}`, describe(job)), here.get(gpu).paused.includes(job) ? " (paused) " : " "])))));
  };

  const update = () => {
    const now = store.now();
    const living = store.living();
    const on = living.filter((row) => row.status === "running" || row.status === "starting");
    const queue = living.filter((row) => row.status === "pending" && !row.held);
    const paused = living.filter((row) => PAUSED.has(row.status));
    const start = (row) => store.forecast.jobs[row.job]?.start;
    const first = (row) => start(row)?.[0] ?? Infinity;
    queue.sort((a, b) => first(a) - first(b) || Number(a.job) - Number(b.job));
    say(tiles[2].value, `${on.length}`);
    say(tiles[3].value, `${paused.length}`);
    say(tiles[4].value, `${queue.length}`);
    const held = living.filter((row) => row.held).length;
    say(tiles[4].more, held ? `${held} on hold` : "");
    say(tiles[5].value, queue.length && start(queue[0]) ? until(start(queue[0]), now).replace(/^in /, "") : "–");
    show(waiting, queue.slice(0, SHOWN).map((row) => item(row, el("span", { class: "when" }, until(start(row), now) || "…"), row.reason)),
      queue.length ? null : el("p", { class: "quiet" }, store.loaded ? "No job waits." : "Loading …"));
    const here = [...on, ...paused].sort((a, b) => Number(b.job) - Number(a.job));
    show(running, here.slice(0, SHOWN).map((row) => item(row, bar(row.progress, `Progress of job ${row.job}`),
      [row.on.join(" "), row.mates.length ? `beside ${jobs(row.mates)}` : "", row.ran_s > 1 ? span(row.ran_s) : ""].filter(Boolean).join(" · "))),
      here.length > SHOWN ? link("/jobs", `${plural(here.length - SHOWN, "more job")}`) : null,
      here.length ? null : el("p", { class: "quiet" }, store.loaded ? "No job runs." : "Loading …"));
    drawSoon();
  };
  return { node, update, close: () => (clearTimeout(later), timeline.close()) };
}

function item(row, right, below) {
  return el("a", { class: "item", href: `#/job/${row.job}` },
    el("span", { class: "item-main" }, el("span", { class: `dot c${Number(row.job) % 12}` }), el("strong", {}, row.job), el("span", { class: "name" }, row.name), row.status === "running" || row.status === "pending" ? null : chip(row.status)),
    right,
    el("span", { class: "item-below" }, `${row.user} · ${plural(row.gpus, "GPU")}${below ? ` · ${below}` : ""}`));
}

function legend() {
  const sign = (kind, label) => el("span", { class: "sign" }, el("span", { class: `swatch ${kind}` }), label);
  return el("div", { class: "legend", "aria-hidden": "true" }, sign("solid", "ran"), sign("light", "expected"), sign("hatched", "paused"));
}
