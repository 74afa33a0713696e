// What the page has loaded: jobs, places, forecasts. Events say what changed, and only that is asked for again.

import { Refusal, follow, get } from "./api.js";

const SOON_MS = 100; // after the first event, others follow at once
const APART_MS = 500;
const PROGRESS_MS = 5000;
const FORECAST_MS = 10000;
const PAGE = 1000;
const MOST_IDS = 200;
const ENDED = new Set(["finished", "failed", "cancelled"]);
const HOUR = 3600;
const MOVES = new Set(["Planned", "Started", "Computing", "Paused", "Resumed", "Stopped", "Finished", "Failed", "PausedByOwner", "ResumedByOwner", "NodeJoined", "NodeLost"]);

export const isEnded = (row) => ENDED.has(row.status);

export class Store {
  constructor() {
    this.me = null;
    this.info = null;
    this.jobs = new Map(); // rows of jobs that have not ended, and of those that ended while the page was open
    this.places = [];
    this.gpus = [];
    this.forecast = { jobs: {}, places: [] };
    this.skew = 0; // seconds by which the service's clock is ahead of the browser's
    this.connected = true;
    this.loaded = false;
    this.error = null;
    this.onSignedOut = () => {};
    this._listeners = new Set();
    this._touched = new Set();
    this._moved = false;
    this._timer = null;
    this._flushed = 0;
    this._stop = new AbortController();
  }

  /** The time of the service. */
  now() {
    return Date.now() / 1000 + this.skew;
  }

  /** Call a function after every change, until the returned function is called. */
  listen(listener) {
    this._listeners.add(listener);
    return () => this._listeners.delete(listener);
  }

  _tell() {
    for (const listener of this._listeners) listener();
  }

  /** Load everything and follow what happens. */
  async start() {
    [this.me, this.info] = await Promise.all([get("/v1/me"), get("/v1/status")]);
    follow((kind, data) => this._hear(kind, data), (error) => this._lost(error), this._stop.signal);
    this._timers = [
      setInterval(() => this._refresh(), PROGRESS_MS),
      setInterval(() => this._loadForecast(), FORECAST_MS),
    ];
    document.addEventListener("visibilitychange", () => this._plan(), { signal: this._stop.signal });
  }

  stop() {
    this._stop.abort();
    this._timers?.forEach(clearInterval);
    clearTimeout(this._timer);
    this._listeners.clear();
  }

  _lost(error) {
    if (error instanceof Refusal && error.status === 401) this.onSignedOut();
    if (this.connected) {
      this.connected = false;
      this._tell();
    }
  }

  _hear(kind, data) {
    if (!this.connected) {
      this.connected = true;
      this._tell();
    }
    if (kind === "Hello" && this.loaded) return; // resumed: the missed events follow
    if (kind === "Hello" || kind === "Gap") {
      this._load();
      return;
    }
    for (const job of [data.job, ...(data.decisions ?? []).map((one) => one.job)]) if (job) this._touched.add(job);
    if (MOVES.has(kind)) this._moved = true;
    this._plan();
  }

  _plan() {
    if (this._stop.signal.aborted || this._timer !== null || document.hidden || !(this._touched.size || this._moved)) return;
    const pause = Math.max(SOON_MS, this._flushed + APART_MS - Date.now());
    this._timer = setTimeout(() => this._flush(), pause);
  }

  async _flush() {
    const jobs = [...this._touched].slice(0, MOST_IDS);
    for (const job of jobs) this._touched.delete(job);
    const moved = this._moved;
    this._moved = false;
    this._flushed = Date.now();
    await this._try(async () => {
      const [rows] = await Promise.all([
        jobs.length ? get(`/v1/jobs?ids=${jobs.join(",")}`) : { jobs: [] },
        moved ? this._loadPlaces(true) : null,
      ]);
      this._take(rows.jobs);
    });
    this._timer = null;
    this._plan();
    this._tell();
  }

  async _try(work) {
    try {
      await work();
      this.error = null;
    } catch (error) {
      if (error instanceof Refusal && error.status === 401) this.onSignedOut();
      this.error = error.message;
    }
  }

  _take(rows) {
    for (const row of rows) this.jobs.set(row.job, row);
  }

  async _load() {
    await this._try(async () => {
      this.jobs = new Map();
      await this._loadPlaces(false);
      let before = "";
      do {
        const page = await get(`/v1/jobs?limit=${PAGE}${before ? `&before=${before}` : ""}`);
        this._take(page.jobs);
        before = page.next;
        this.loaded = true;
        this._tell();
      } while (before);
      await this._loadForecast();
    });
    this._tell();
  }

  async _loadPlaces(onlyNew) {
    const since = onlyNew && this._seen ? `?since=${this._seen - 1}` : "";
    const told = await get(`/v1/timeline${since}`);
    this.skew = told.now - Date.now() / 1000;
    const fresh = new Set(told.places.map((one) => `${one.job} ${one.start}`));
    const known = since ? this.places.filter((one) => (one.end ?? 0) > told.now - HOUR && !fresh.has(`${one.job} ${one.start}`)) : [];
    this.places = [...known.filter((one) => one.end !== null), ...told.places];
    this.gpus = told.gpus;
    this._seen = told.now;
  }

  async _loadForecast() {
    if (document.hidden || !this.loaded) return;
    await this._try(async () => {
      this.forecast = await get("/v1/forecast");
    });
    this._tell();
  }

  /** Ask for the progress of running jobs, which grows without an event. */
  _refresh() {
    if (document.hidden || !this.loaded) return;
    for (const row of this.jobs.values()) if (row.status === "running") this._touched.add(row.job);
    if (this._touched.size) this._plan();
    else this._tell();
  }

  living() {
    return [...this.jobs.values()].filter((row) => !isEnded(row));
  }

  name(job) {
    return this.jobs.get(job)?.name ?? "";
  }
}
