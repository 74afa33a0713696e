// Jobs: all that have not ended, with why they wait and when they are expected.

import { bar, chip, el, link, say } from "./dom.js";
import { jobs, plural, span, until } from "./format.js";
import { VirtualTable } from "./table.js";

const RANK = { running: 0, starting: 1, resuming: 2, pausing: 3, paused: 4, stopping: 5, pending: 6, held: 7, blocked: 8 };

export function jobsView(store) {
  const start = (row) => store.forecast.jobs[row.job]?.start;
  const end = (row) => store.forecast.jobs[row.job]?.end;
  const columns = [
    { label: "Job", cell: (row) => link(`/job/${row.job}`, row.job), sort: (row) => Number(row.job) },
    { label: "Name", cell: (row) => el("span", { class: "name", title: row.name }, row.name), sort: (row) => row.name },
    { label: "User", cell: (row) => row.user, sort: (row) => row.user },
    { label: "Status", cell: (row) => chip(row.held ? "held" : row.status), sort: (row) => RANK[row.status] ?? 9 },
    { label: "GPUs", cell: (row) => `${row.gpus}`, sort: (row) => row.gpus },
    { label: "Progress", cell: (row) => (row.started ? bar(row.progress, `Progress of job ${row.job}`) : ""), sort: (row) => -row.progress },
    { label: "When", cell: (row) => (row.started ? (end(row) ? `ends ${until(end(row), store.now())}` : "") : until(start(row), store.now())), sort: (row) => (row.started ? end(row)?.[0] : start(row)?.[0]) ?? Infinity },
    { label: "Why and where", cell: (row) => el("span", { class: "name", title: why(row) }, why(row)) },
    { label: "Waited", cell: (row) => span(row.waited_s), sort: (row) => row.waited_s },
  ];
  const table = new VirtualTable({ label: "Jobs that have not ended", columns, layout: "grid-jobs", empty: "No job waits or runs." });
  const filter = el("input", { id: "filter", type: "search", placeholder: "name, user, status or id", oninput: () => update() });
  const mine = el("input", { id: "mine", type: "checkbox", onchange: () => update() });
  const count = el("span", { class: "quiet", role: "status" });
  const update = () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const fits = (row) => {
      if (mine.checked && row.user !== store.me.name) return false;
      const text = `${row.job} ${row.name} ${row.user} ${row.held ? "held" : row.status}`.toLowerCase();
      return words.every((word) => text.includes(word));
    };
    const rows = store.living().filter(fits);
    const first = (row) => start(row)?.[0] ?? Infinity;
    rows.sort((a, b) => (RANK[a.status] ?? 9) - (RANK[b.status] ?? 9) || (a.status === "pending" ? first(a) - first(b) || 0 : 0) || Number(a.job) - Number(b.job));
    table.set(rows);
    say(count, store.loaded ? plural(rows.length, "job") : "Loading …");
  };
  const node = el("section", { class: "card tall" },
    el("div", { class: "card-head" }, el("h1", {}, "Jobs"), count),
    el("div", { class: "tools" }, el("label", { for: "filter" }, "Show"), filter, el("label", { for: "mine", class: "check" }, mine, "only mine")),
    table.node);
  return { node, update, close: () => table.close() };
}

function why(row) {
  if (row.on.length) return `${row.on.join(" ")}${row.mates.length ? `, beside ${jobs(row.mates)}` : ""}${row.reason ? `; ${row.reason}` : ""}`;
  return row.reason;
}
