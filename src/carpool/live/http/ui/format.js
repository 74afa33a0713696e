// Numbers as people read them.

const UNITS = [[86400, "d", 3600, "h"], [3600, "h", 60, "min"], [60, "min", 1, "s"]];

/** Return seconds in their two largest units, as the commands print them: `45 s`, `2 min 5 s`, `3 h 5 min`, `2 d 4 h`. */
export function span(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  const sign = seconds < 0 ? "−" : "";
  const s = Math.abs(seconds);
  if (s < 9.95) return `${sign}${s.toFixed(1)} s`;
  const whole = Math.round(s);
  for (const [size, unit, smaller, name] of UNITS) {
    if (whole < size) continue;
    const more = Math.floor((whole % size) / smaller);
    return `${sign}${Math.floor(whole / size)} ${unit}${more && whole < 100 * size ? ` ${more} ${name}` : ""}`;
  }
  return `${sign}${whole} s`;
}

/** Return seconds in words, rounded as the end of a range: `45 s`, `12 min`, `3 h 5 min`, `2 d 4 h`. */
function about(seconds) {
  if (seconds < 59.5) return span(seconds);
  const minutes = Math.round(seconds / 60);
  return minutes < 90 ? `${minutes} min` : span(minutes * 60);
}

/** Return a moment as a time of day, with the date where it is another day. `step`: seconds that have to differ. */
export function clock(at, step = 60) {
  if (!Number.isFinite(at)) return "–";
  const when = new Date(at * 1000);
  const seconds = step < 60 ? { second: "2-digit" } : {};
  const time = when.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", ...seconds });
  const sameDay = when.toDateString() === new Date().toDateString();
  return sameDay ? time : `${when.toLocaleDateString([], { month: "short", day: "numeric" })} ${time}`;
}

/** Return a range of moments as the time until them: `in 5–12 min`. */
export function until(times, now) {
  if (!times) return "";
  const [believed, early, late] = times;
  if (believed === null || !Number.isFinite(believed)) return "not foreseen";
  const low = Math.max(0, early - now);
  const high = late === null ? Infinity : late - now;
  if (high < 1) return "now";
  if (!Number.isFinite(high)) return `in ${about(low)} or more`;
  if (low < 0.05) return `within ${about(high)}`;
  const [from, to] = [about(low), about(high)];
  if (from === to) return `in ${to}`;
  const [amount, unit] = from.split(" ");
  return `in ${from.split(" ").length === 2 && to.endsWith(` ${unit}`) && to.split(" ").length === 2 ? amount : from} – ${to}`;
}

/** Return the time of one iteration: `11.6 ms`, `1.25 s`. */
export function iterationTime(seconds) {
  return seconds < 0.9995 ? `${(seconds * 1000).toPrecision(3)} ms` : `${seconds.toPrecision(3)} s`;
}

/** Return bytes with a unit. */
export function bytes(number) {
  if (!number) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = Math.min(units.length - 1, Math.floor(Math.log2(number) / 10));
  return `${(number / 1024 ** power).toFixed(power > 2 ? 1 : 0)} ${units[power]}`;
}

/** Return GPU-seconds as hours. */
export function gpuHours(seconds) {
  const hours = seconds / 3600;
  if (!hours) return "0 h";
  return `${hours < 0.1 ? hours.toFixed(3) : hours < 10 ? hours.toFixed(2) : hours < 100 ? hours.toFixed(1) : Math.round(hours)} h`;
}

export function percent(share) {
  return share === null || share === undefined ? "–" : `${Math.round(share * 100)} %`;
}

/** Return an error as a share of what was estimated. Where nothing was known, it has no meaning as a percentage. */
export function relativeError(share) {
  return share > 10 ? "over 1000 %" : percent(share);
}

/** Return the names of jobs. */
export function jobs(ids) {
  return `job${ids.length === 1 ? "" : "s"} ${ids.join(", ")}`;
}

export function plural(number, word) {
  return `${number} ${word}${number === 1 ? "" : "s"}`;
}
