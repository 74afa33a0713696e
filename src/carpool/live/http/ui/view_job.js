// One job: state, explanation, receipt, progress and slow-down over time, demand, changes by its owner, live logs.

import { get, post, request } from "./api.js";
import { lineChart } from "./chart.js";
import { chip, el, link, say, show } from "./dom.js";
import { bytes, clock, iterationTime, percent, span } from "./format.js";
import { logs } from "./logs.js";
import { isEnded } from "./store.js";
import { COLOURS } from "./timeline.js";

const AGAIN_MS = 3000; // an explanation costs the service a forecast

export function jobView(store, job) {
  const title = el("h1", {}, `Job ${job}`);
  const state = el("span", { class: "state" });
  const facts = el("dl", { class: "facts" });
  const actions = el("div", { class: "actions" });
  const said = el("p", { class: "problem", role: "alert" });
  const sentences = el("div", { class: "prose" }, el("p", { class: "quiet" }, "Loading …"));
  const receipt = el("div", { class: "prose" });
  const charts = el("div", { class: "columns" });
  const demand = el("div");
  const more = el("div");
  const log = el("div");
  const about = el("div", { class: "columns" },
    el("section", { class: "card" }, el("h2", {}, "Why"), sentences),
    el("section", { class: "card" }, el("h2", {}, "Receipt"), receipt, demand));
  const node = el("div", {},
    el("section", { class: "card" }, el("div", { class: "card-head" }, el("div", { class: "title" }, el("span", { class: `dot c${Number(job) % COLOURS}` }), title, state), actions), said, facts),
    about, charts, log, more);

  let row = null;
  let looked = 0;
  let looking = false;
  let later = null;
  let stopLogs = null;
  let seen = "";
  let offered = "";
  let missing = false;

  const act = async (method, path, data) => {
    say(said, "");
    try {
      await (method === "PUT" ? request("PUT", path, data) : post(path));
    } catch (error) {
      say(said, error.message);
    }
    look(true);
  };

  const look = async (now = false) => {
    if (looking || (!now && Date.now() - looked < AGAIN_MS)) return;
    looking = true;
    looked = Date.now();
    try {
      const [shown, explained, trace] = await Promise.all([get(`/v1/jobs/${job}`), get(`/v1/jobs/${job}/explain`), get(`/v1/jobs/${job}/trace`)]);
      row = shown;
      missing = false;
      draw(explained, trace);
    } catch (error) {
      say(said, error.message);
      missing = row === null && error.status === 404; // until the store has it
    }
    about.hidden = missing;
    looking = false;
  };

  const draw = (explained, trace) => {
    say(title, `Job ${job} ${row.name}`.trim());
    document.title = `Job ${job} ${row.name} · Carpool`;
    show(state, chip(row.held ? "held" : row.status));
    show(facts, factsOf(row, explained, store.now()));
    const told = row.receipt?.sentences ?? [];
    show(sentences, explained.sentences.filter((one) => !isEnded(row) || !told.includes(one)).map((one) => el("p", {}, one)));
    show(receipt, told.map((one) => el("p", {}, one)), numbers(row.receipt));
    show(demand, row.demand ? demandOf(row.demand) : null);
    show(charts, chartsOf(trace));
    const own = store.me.admin || store.me.name === row.user;
    const possible = JSON.stringify([own, row.status, row.held, row.priority]);
    if (possible !== offered) show(actions, own && !isEnded(row) ? buttons(row, act) : null); // a dialog may be open
    offered = possible;
    if (own && stopLogs === null) {
      const made = logs(job, row);
      show(log, made.node);
      stopLogs = made.close;
    }
    show(more, own && row.spec ? spec(row) : null);
  };

  const update = () => {
    const known = store.jobs.get(job);
    const mark = known ? JSON.stringify([known.status, known.held, known.attempt, known.mates, known.priority, known.on]) : "";
    const changed = mark !== seen;
    seen = mark;
    clearTimeout(later);
    if (changed || (row === null && !missing)) look(true);
    else if (row !== null && !isEnded(row)) later = setTimeout(() => look(), AGAIN_MS);
  };
  return { node, update, close: () => (clearTimeout(later), stopLogs?.()) };
}

function factsOf(row, explained, now) {
  const fact = (name, value) => (value ? el("div", {}, el("dt", {}, name), el("dd", {}, value)) : null);
  const range = (times) => {
    if (!times) return null;
    const step = times.high === null || times.high - times.low > 600 ? 60 : 1; // a short range needs seconds
    return `${clock(times.value, step)} (${clock(times.low, step)} – ${times.high === null ? "open" : clock(times.high, step)})`;
  };
  return [
    fact("Owner", row.user),
    fact("Submitted", clock(row.submitted)),
    fact("Started", row.started ? clock(row.started) : null),
    fact("Expected start", row.started ? null : range(explained.start)),
    fact("Ended", row.finished ? clock(row.finished) : null),
    fact("Expected end", row.finished ? null : range(explained.end)),
    fact("Position", explained.position ? `${explained.position} in the queue` : null),
    fact("GPUs", `${row.gpus}${row.on.length ? `: ${row.on.join(" ")}` : ""}`),
    fact("Beside", row.mates.length ? row.mates.map((mate) => [link(`/job/${mate}`, `job ${mate}`), " "]) : null),
    fact("Progress", row.started ? `${percent(row.progress)}${row.measured || row.finished ? "" : ", estimated"}` : null),
    fact("Per iteration", row.reported_iteration_s ? iterationTime(row.reported_iteration_s) : null),
    fact("Waited", span(row.waited_s)),
    fact("Ran", row.ran_s ? span(row.ran_s) : null),
    fact("Paused", row.pauses ? `${row.pauses} ×, ${span(row.paused_s)}` : null),
    fact("Priority", `${row.priority}`),
    fact("Attempt", row.attempt > 1 ? `${row.attempt}` : null),
    fact("Exit code", row.exit_code === null ? null : `${row.exit_code}`),
  ];
}

function numbers(receipt) {
  if (!receipt) return null;
  const cell = (name, value, tone = "") => el("div", { class: "number" }, el("span", { class: "quiet" }, name), el("strong", { class: tone }, value));
  return el("div", { class: "numbers" },
    cell("GPU time", span(receipt.gpu_s)),
    receipt.slowdown ? cell("Slow-down", `${receipt.slowdown.toFixed(2)} ×`) : null,
    receipt.gained_s === null ? null : cell(receipt.gained_s >= 0 ? "Gained" : "Lost", span(Math.abs(receipt.gained_s)), receipt.gained_s >= 0 ? "good" : "bad"));
}

function demandOf(demand) {
  const part = (name, share) => el("div", { class: "demand" }, el("span", {}, name), el("progress", { max: 1, value: share, "aria-label": `Demand: ${name}` }), el("span", { class: "quiet" }, percent(share)));
  return [el("h3", {}, "Demand of a GPU, alone"), part("Multiprocessors", demand.sm), part("Memory bandwidth", demand.dram), part("Tensor cores", demand.tensor),
    demand.memory ? el("p", { class: "quiet" }, `Memory: ${bytes(demand.memory)}`) : null];
}

function chartsOf(trace) {
  const points = trace.points;
  if (points.length < 2) return null;
  const progress = points.map(([at, done]) => [at, done]);
  const slow = points.map(([at, , slowdown]) => [at, slowdown]);
  const most = Math.max(1.5, ...slow.map(([, value]) => value ?? 1));
  return [
    el("section", { class: "card" }, el("h2", {}, "Progress"),
      lineChart({ label: `Progress over time, ${percent(progress.at(-1)[1])} at the end`, points: progress, low: 0, high: 1, xText: clock, yText: percent })),
    el("section", { class: "card" }, el("h2", {}, "Slow-down"),
      lineChart({ label: "Slow-down over time; 1 is the speed alone", points: slow, low: 1, high: Math.ceil(most * 2) / 2, xText: clock, yText: (value) => `${value.toFixed(2)} ×`, steps: true })),
  ];
}

function buttons(row, act) {
  const path = `/v1/jobs/${row.job}`;
  const button = (label, name, kind = "plain") => el("button", { type: "button", class: kind, onclick: () => act("POST", `${path}/${name}`) }, label);
  const waits = ["pending", "held", "blocked"].includes(row.status);
  const paused = ["paused", "pausing"].includes(row.status);
  const priority = el("input", { type: "number", min: -1000, max: 1000, value: row.priority, "aria-label": "Priority" });
  const setPriority = (event) => {
    event.preventDefault();
    act("PUT", `${path}/priority`, { priority: Number(priority.value) });
  };
  return [
    waits && !row.held ? button("Hold", "hold") : null,
    row.held ? button("Release", "release") : null,
    row.status === "running" ? button("Pause", "pause") : null,
    paused ? button("Resume", "resume") : null,
    el("form", { class: "priority", onsubmit: setPriority }, priority, el("button", { type: "submit", class: "plain" }, "Set priority")),
    cancelButton(row, act),
  ];
}

function cancelButton(row, act) {
  const dialog = el("dialog", { "aria-label": "Cancel this job?" },
    el("p", {}, `Cancel job ${row.job}? All its workers are stopped for good.`),
    el("form", { method: "dialog", class: "actions" },
      el("button", { class: "plain", value: "no" }, "Keep it"),
      el("button", { class: "danger", value: "yes" }, "Cancel the job")));
  dialog.addEventListener("close", () => dialog.returnValue === "yes" && act("POST", `/v1/jobs/${row.job}/cancel`));
  return [el("button", { type: "button", class: "danger", onclick: () => dialog.showModal() }, "Cancel"), dialog];
}

function spec(row) {
  const lines = Object.entries(row.spec).filter(([name, value]) => name !== "env" && value !== null && value !== "" && !(Array.isArray(value) && !value.length));
  const text = (value) => (Array.isArray(value) ? value.map((word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : JSON.stringify(word))).join(" ") : typeof value === "object" ? JSON.stringify(value) : String(value));
  return el("section", { class: "card" }, el("details", {}, el("summary", {}, el("h2", {}, "What was submitted")),
    el("dl", { class: "spec" }, lines.map(([name, value]) => [el("dt", {}, name), el("dd", {}, text(value))])),
    row.spec.env && Object.keys(row.spec.env).length ? el("p", { class: "quiet" }, `Variables: ${Object.keys(row.spec.env).join(", ")}`) : null));
}
