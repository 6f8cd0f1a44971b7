/* Numbers, times and states as text. An unknown value is an en dash. */

export const NONE = "–";

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** Return a number with about three digits that count. */
export function number(value) {
  if (!isNumber(value)) return NONE;
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2).replace("e+", "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(size >= 1 ? 4 : 3)));
}

/** Return a count with separators; large ones with a letter. */
export function count(value) {
  if (!isNumber(value)) return NONE;
  const size = Math.abs(value);
  for (const [unit, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"]]) {
    if (size >= 10 * unit || (size >= unit && letter !== "M")) return `${Number((value / unit).toPrecision(3))} ${letter}`;
  }
  if (size >= 100 || Number.isInteger(value)) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(3)));
}

export function percent(share) {
  if (!isNumber(share)) return NONE;
  const value = 100 * share;
  if (value > 0 && value < 0.1) return "< 0.1 %";
  return `${value < 10 && value !== Math.round(value) ? value.toFixed(1) : Math.round(value)} %`;
}

/** Return seconds as text: `0.25 s`, `12 s`, `4:05`, `2:04:05`, `3 d 4 h`. */
export function duration(seconds) {
  if (!isNumber(seconds)) return NONE;
  const size = Math.abs(seconds);
  if (size < 0.001) return `${Number((seconds * 1e6).toPrecision(3))} µs`;
  if (size < 1) return `${Number((seconds * 1000).toPrecision(3))} ms`;
  if (size < 60) return `${size < 10 ? Number(seconds.toPrecision(3)) : Math.round(seconds)} s`;
  const whole = Math.round(seconds);
  if (whole >= 2 * 86400) return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
  const two = (part) => String(part).padStart(2, "0");
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor((whole % 3600) / 60)];
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

/** Return seconds as words: `4 min 5 s`, which a reader cannot take for hours. */
export function spoken(seconds) {
  if (!isNumber(seconds)) return NONE;
  if (seconds < 60) return duration(seconds);
  const minutes = Math.round(seconds / 60);
  if (seconds < 600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  if (minutes < 120) return `${minutes} min`;
  if (minutes < 2880) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  return `${Math.floor(minutes / 1440)} d ${Math.floor((minutes % 1440) / 60)} h`;
}

export function bytes(value) {
  if (!isNumber(value)) return NONE;
  for (const [unit, name] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (value >= unit) return `${Number((value / unit).toPrecision(3))} ${name}`;
  }
  return `${value} B`;
}

const DAY = { year: "numeric", month: "2-digit", day: "2-digit" };
const CLOCK = { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false };

/** Return a time (seconds since the epoch) as local date and clock. */
export function moment(time) {
  return isNumber(time) ? new Date(time * 1000).toLocaleString("sv-SE", { ...DAY, ...CLOCK }) : NONE;
}

/** Return the local clock of a time (seconds since the epoch), with milliseconds if asked. */
export function clock(time, digits = 0) {
  if (!isNumber(time)) return NONE;
  const date = new Date(time * 1000);
  const text = date.toLocaleTimeString("sv-SE", CLOCK);
  return digits ? `${text}.${String(date.getMilliseconds()).padStart(3, "0").slice(0, digits)}` : text;
}

export function ago(time) {
  if (!isNumber(time)) return NONE;
  const seconds = Date.now() / 1000 - time;
  return seconds < 2 ? "just now" : `${spoken(seconds)} ago`;
}

/** Return any value of a record on one line. */
export function plain(value) {
  if (value === null || value === undefined) return NONE;
  if (typeof value === "number") return number(value);
  if (typeof value === "boolean") return value ? "yes" : "no";
  return typeof value === "string" ? value : JSON.stringify(value);
}

/** Return the value of a setting as it is written in a file. */
export function setting(value) {
  if (value === null || value === undefined) return "null";
  return typeof value === "string" ? value || '""' : JSON.stringify(value);
}

export const plural = (number_, noun, nouns = `${noun}s`) => `${count(number_)} ${number_ === 1 ? noun : nouns}`;
