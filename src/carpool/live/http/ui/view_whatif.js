// What if: the jobs that finished here, simulated under the policy of this service and under another one.

import { get, post } from "./api.js";
import { el, say, show } from "./dom.js";
import { plural, span } from "./format.js";
import { Timeline } from "./timeline.js";

export function whatIfView(store) {
  const choice = el("select", { id: "policy" });
  const about = el("p", { class: "quiet" });
  const said = el("p", { class: "problem", role: "alert" });
  const progress = el("span", { class: "quiet", role: "status" });
  const results = el("div", { class: "columns pictures" });
  const verdict = el("div", { class: "prose" });
  const button = el("button", { type: "submit" }, "Simulate");
  let open = [];
  let summaries = {};

  const run = async (event) => {
    event.preventDefault();
    button.disabled = true;
    say(said, "");
    say(progress, "Simulating …");
    try {
      draw(await post("/v1/what-if", { policy: choice.value }));
    } catch (error) {
      say(said, error.message);
    }
    say(progress, "");
    button.disabled = false;
  };
  const draw = (told) => {
    open.forEach((one) => one.close());
    const gpus = Array.from({ length: gpuCount(told.cluster) }, (_, index) => index);
    const to = Math.max(1, ...told.runs.map((one) => one.makespan_s));
    const names = (job) => `job ${job} ${told.names[job]?.name ?? ""}`.trim();
    open = told.runs.map((one, index) => {
      const picture = new Timeline({ label: `${one.policy}: jobs on each GPU over time, ${span(one.makespan_s)} in all`, describe: names, open: (job) => (location.hash = `#/job/${job}`) });
      picture.summary = el("section", { class: "card" }, el("h2", {}, one.policy, index ? null : el("span", { class: "quiet" }, " · as here")),
        el("div", { class: "numbers" }, number("Mean completion", one.mean_jct_s), number("Mean wait", one.mean_queue_s), number("All done after", one.makespan_s)), picture.node);
      return picture;
    });
    show(results, open.map((one) => one.summary));
    told.runs.forEach((one, index) => open[index].draw({ gpus: gpus.map((gpu) => `GPU ${gpu}`), slices: one.slices.map((slice) => ({ ...slice, gpu: `GPU ${slice.gpu}` })), from: 0, to, now: to * 2, ticks: (at) => span(at) }));
    const [own, other] = told.runs;
    const ratio = other.mean_jct_s / own.mean_jct_s;
    show(verdict, el("p", {}, `${plural(told.jobs, "finished job")} of this service, simulated. Mean completion under ${other.policy}: ${span(other.mean_jct_s)}, ${compared(ratio)} under ${own.policy}. Really achieved: ${span(told.achieved.mean_jct_s)}, of which ${span(told.achieved.mean_queue_s)} before the start.`));
  };
  const node = el("div", {},
    el("section", { class: "card" }, el("h1", {}, "What if another policy had decided?"),
      el("p", { class: "quiet" }, "Simulates the jobs that finished here, once under the policy of this service and once under another one."),
      el("form", { class: "tools", onsubmit: run }, el("label", { for: "policy" }, "Policy"), choice, button, progress), about, said, verdict),
    results);
  const load = async () => {
    const { policies } = await get("/v1/policies");
    summaries = Object.fromEntries(policies.map((one) => [one.name, one.summary]));
    show(choice, policies.map((one) => el("option", { value: one.name }, one.name)));
    choice.value = store.info.policy.startsWith("fifo") ? "sjf-bsbf" : "fifo";
    say(about, summaries[choice.value]);
  };
  choice.addEventListener("change", () => say(about, summaries[choice.value]));
  load().catch((error) => say(said, error.message));
  return { node, close: () => open.forEach((one) => one.close()) };
}

function compared(ratio) {
  const share = Math.round(Math.abs(ratio - 1) * 100);
  return share ? `${share} % ${ratio > 1 ? "longer" : "shorter"} than` : "the same as";
}

function number(name, seconds) {
  return el("div", { class: "number" }, el("span", { class: "quiet" }, name), el("strong", {}, span(seconds)));
}

function gpuCount(cluster) {
  const [nodes, each] = cluster.split("x").map(Number);
  return nodes * each;
}
