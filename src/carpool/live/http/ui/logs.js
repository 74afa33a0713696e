// A worker's output as it is written. Bytes become text and nothing else; colours of terminals are dropped.

import { readLog } from "./api.js";
import { el, say, show } from "./dom.js";

const EVERY_MS = 1000;
const TAIL = 1000;
const MOST = 1_000_000; // characters that stay on the page
const ESCAPES = /\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])/g; // eslint-disable-line no-control-regex

export function logs(job, row) {
  const text = el("pre", { class: "log", tabindex: 0, "aria-label": `Output of job ${job}`, role: "log" });
  const note = el("span", { class: "quiet", role: "status" });
  const rank = el("select", { id: "rank", onchange: () => begin() }, Array.from({ length: Math.min(row.gpus, 256) }, (_, number) => el("option", { value: number }, `worker ${number}`)));
  const stream = el("select", { id: "stream", onchange: () => ((chosen = true), begin()) }, ["stdout", "stderr"].map((name) => el("option", { value: name }, name)));
  stream.value = row.status === "failed" ? "stderr" : "stdout"; // why it failed is mostly there
  const node = el("section", { class: "card" },
    el("div", { class: "card-head" }, el("h2", {}, "Output"), note),
    el("div", { class: "tools" }, el("label", { for: "rank" }, "Of"), rank, el("label", { for: "stream" }, "stream"), stream),
    text);
  let timer = null;
  let turn = 0;
  let chosen = false; // by the user

  const begin = () => {
    clearTimeout(timer);
    show(text);
    const reading = { number: ++turn, query: { rank: rank.value, stream: stream.value, tail: TAIL }, decoder: new TextDecoder(), rest: "" };
    step(reading);
  };
  const step = async (reading) => {
    let pause = EVERY_MS;
    try {
      if (!document.hidden) {
        const part = await readLog(job, reading.query);
        if (reading.number !== turn) return;
        reading.query = { rank: reading.query.rank, stream: reading.query.stream, offset: part.next, attempt: part.attempt };
        append(reading, part.bytes);
        if (part.ended && !chosen && !text.textContent) return other();
        say(note, part.ended ? "complete" : "live");
        if (part.ended) return;
        if (part.bytes.length > 500_000) pause = 50;
      }
    } catch (error) {
      if (reading.number !== turn) return;
      say(note, error.message);
      pause = 5 * EVERY_MS;
    }
    timer = setTimeout(() => step(reading), pause);
  };
  const other = () => {
    chosen = true; // both may be empty
    stream.value = stream.value === "stdout" ? "stderr" : "stdout";
    begin();
  };
  const append = (reading, bytes) => {
    if (!bytes.length) return;
    const atEnd = text.scrollHeight - text.scrollTop - text.clientHeight < 40;
    const all = reading.rest + reading.decoder.decode(bytes, { stream: true }).replace(ESCAPES, "");
    const cut = all.lastIndexOf("\n") + 1;
    const lines = all.slice(0, cut).replace(/^.*\r(?!\n)/gm, "").replaceAll("\r", "");
    reading.rest = all.slice(cut);
    text.lastChild?.remove(); // the unfinished line
    text.append(lines, reading.rest.replace(/^.*\r/s, ""));
    while (text.textContent.length > MOST && text.childNodes.length > 2) text.firstChild.remove();
    if (atEnd) text.scrollTop = text.scrollHeight;
  };
  begin();
  return { node, close: () => (clearTimeout(timer), turn++) };
}
