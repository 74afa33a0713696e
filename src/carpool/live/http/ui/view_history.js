// History: jobs that have ended, what sharing gained or cost them, and how accurate forecasts were.

import { get } from "./api.js";
import { chip, el, link, say, show } from "./dom.js";
import { clock, percent, plural, relativeError, span } from "./format.js";
import { isEnded } from "./store.js";
import { VirtualTable } from "./table.js";

const PAGE = 500;

export function historyView(store) {
  let rows = [];
  let next = "";
  let loading = false;
  let seen = 0;
  const columns = [
    { label: "Job", cell: (row) => link(`/job/${row.job}`, row.job), sort: (row) => -Number(row.job) },
    { label: "Name", cell: (row) => el("span", { class: "name", title: row.name }, row.name), sort: (row) => row.name },
    { label: "User", cell: (row) => row.user, sort: (row) => row.user },
    { label: "Status", cell: (row) => chip(row.status), sort: (row) => row.status },
    { label: "GPUs", cell: (row) => `${row.gpus}`, sort: (row) => row.gpus },
    { label: "Ended", cell: (row) => clock(row.finished), sort: (row) => -row.finished },
    { label: "Waited", cell: (row) => span(row.waited_s), sort: (row) => -row.waited_s },
    { label: "Ran", cell: (row) => span(row.ran_s), sort: (row) => -row.ran_s },
    { label: "Sharing", cell: (row) => gain(row.receipt), sort: (row) => -(row.receipt?.gained_s ?? 0) },
  ];
  const table = new VirtualTable({ label: "Jobs that have ended", columns, layout: "grid-history", atEnd: () => next && load(), empty: "No job has ended." });
  const count = el("span", { class: "quiet", role: "status" }, "Loading …");
  const accuracy = el("div");
  const node = el("div", {},
    el("section", { class: "card tall" }, el("div", { class: "card-head" }, el("h1", {}, "History"), count), table.node),
    el("section", { class: "card" }, el("h2", {}, "Accuracy of forecasts"), accuracy));

  const load = async (fresh = false) => {
    if (loading) return;
    loading = true;
    try {
      const page = await get(`/v1/history?limit=${PAGE}${!fresh && next ? `&before=${next}` : ""}`);
      if (fresh) {
        const known = new Set(page.jobs.map((row) => row.job));
        rows = [...page.jobs, ...rows.filter((row) => !known.has(row.job))];
        if (next === "") next = page.next;
      } else {
        rows = [...rows, ...page.jobs];
        next = page.next;
      }
      table.set(rows);
      say(count, `${plural(rows.length, "job")}${next ? " so far; scroll for more" : ""}`);
    } catch (error) {
      say(count, error.message);
    }
    loading = false;
  };
  const judge = async () => {
    try {
      show(accuracy, accuracyTable(await get("/v1/accuracy")));
    } catch (error) {
      say(count, error.message);
    }
  };
  const update = () => {
    const ended = [...store.jobs.values()].filter(isEnded).length;
    if (ended === seen && rows.length) return;
    seen = ended;
    load(true);
    judge();
  };
  return { node, update, close: () => table.close() };
}

function gain(receipt) {
  if (!receipt || receipt.gained_s === null) return receipt?.hosted ? el("span", { class: "quiet" }, `hosted, −${span(receipt.lost_s)}`) : "";
  return el("span", { class: receipt.gained_s >= 0 ? "good" : "bad" }, `${receipt.gained_s >= 0 ? "+" : "−"}${span(Math.abs(receipt.gained_s))}`);
}

function accuracyTable({ trials, ...kinds }) {
  const judged = Object.entries(kinds);
  if (!judged.length) return el("p", { class: "quiet" }, "No estimate has been judged.");
  const cell = (text) => el("td", {}, text);
  return [
    el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Accuracy of forecasts" }, el("table", {},
      el("thead", {}, el("tr", {}, ["Estimate of", "Judged", "Median error", "9 of 10 below", "In the range"].map((label) => el("th", { scope: "col" }, label)))),
      el("tbody", {}, judged.map(([kind, one]) => el("tr", {}, el("th", { scope: "row" }, kind), cell(`${one.judged}`),
        cell(`${span(one.median_error_s)}${one.median_error === null ? "" : ` (${relativeError(one.median_error)})`}`), cell(span(one.p90_error_s)), cell(percent(one.within_range))))))),
    trials.begun ? el("p", { class: "quiet" }, `${plural(trials.begun, "trial")} of unknown pairs, ${trials.kept} kept, cost ${span(trials.cost_s)}.`) : null,
  ];
}
