// Requests to the service. The session is a cookie that this script cannot read and a key that it sends along; neither
// is of use without the other.

const KEY = "carpool-key";
const AGAIN_MS = [500, 1000, 2000, 5000];
let session = new AbortController(); // ends the requests of the present session

/** The service refused a request. */
export class Refusal extends Error {
  constructor(status, sentence) {
    super(sentence);
    this.status = status;
  }
}

function headers(more = {}) {
  return { "Carpool-Key": localStorage.getItem(KEY) ?? "", ...more };
}

async function answerOf(response) {
  if (response.ok) return response;
  let sentence = `the service answered with status ${response.status}`;
  try {
    sentence = (await response.json()).error ?? sentence;
  } catch {
    // not JSON: a proxy answered
  }
  throw new Refusal(response.status, sentence);
}

async function send(method, path, data, signal) {
  const body = data === undefined ? undefined : JSON.stringify(data);
  const more = body === undefined ? {} : { "Content-Type": "application/json" };
  const response = await fetch(path, { method, body, headers: headers(more), credentials: "same-origin", signal });
  return (await answerOf(response)).json();
}

/** Send a request and return its answer as data. */
export const request = (method, path, data) => send(method, path, data, session.signal);

export const get = (path) => request("GET", path);
export const post = (path, data) => request("POST", path, data);

/** Return a part of a log: bytes, the offset that follows, and whether that is all. */
export async function readLog(job, query) {
  const path = `/v1/jobs/${job}/logs?${new URLSearchParams(query)}`;
  const response = await answerOf(await fetch(path, { headers: headers(), signal: session.signal }));
  return {
    bytes: new Uint8Array(await response.arrayBuffer()),
    next: response.headers.get("Carpool-Next"),
    attempt: response.headers.get("Carpool-Attempt"),
    ended: response.headers.get("Carpool-Ended") === "1",
  };
}

/** Begin a session with a token. */
export async function signIn(token) {
  const answer = await send("POST", "/session", { token });
  localStorage.setItem(KEY, answer.key);
}

/** End the session, after `dropRequests`: without the key, what is still under way would be refused. */
export async function signOut() {
  localStorage.removeItem(KEY);
  await send("DELETE", "/session");
}

/** Let requests be sent from now on. */
export function allowRequests() {
  session = new AbortController();
}

/** Drop the requests that are under way, and all others until `allowRequests`. */
export function dropRequests() {
  session.abort();
}

export function hasKey() {
  return localStorage.getItem(KEY) !== null;
}

/**
 * Follow what happens, for ever. EventSource could not send the key, so the stream is read here; it is resumed after
 * the last event that arrived. `on(kind, data)` gets every event, `lost(error)` every break.
 */
export async function follow(on, lost, signal) {
  let last = null;
  let breaks = 0;
  while (!signal.aborted) {
    try {
      const more = last === null ? {} : { "Last-Event-ID": last };
      const response = await answerOf(await fetch("/v1/events", { headers: headers(more), signal }));
      for await (const message of messages(response.body)) {
        breaks = 0;
        last = message.id ?? last;
        if (message.event) on(message.event, message.data ? JSON.parse(message.data) : null);
      }
      lost(null);
    } catch (error) {
      if (signal.aborted) return;
      lost(error);
    }
    await new Promise((resolve) => setTimeout(resolve, AGAIN_MS[Math.min(breaks++, AGAIN_MS.length - 1)]));
  }
}

async function* messages(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const message = {};
      for (const line of block.split("\n")) {
        const colon = line.indexOf(":");
        if (colon > 0) message[line.slice(0, colon)] = line.slice(colon + 1).trimStart();
      }
      yield message;
    }
  }
}
