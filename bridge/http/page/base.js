"use strict";
/* Everything shown comes from devices: text goes into the page by textContent only. */
const POLL = 2000, STALE = 8000, MINUTE = 60000, HOUR = 60 * MINUTE, EARLIEST = Date.UTC(2025, 0);
const SVG = "http://www.w3.org/2000/svg";
const $ = (id) => document.getElementById(id);
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const brief = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
const moment = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium", hourCycle: "h23" });

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (bytes >= 1024 && unit < 4) { bytes /= 1024; unit++; }
  return `${bytes >= 100 || unit === 0 ? Math.round(bytes) : bytes.toFixed(1)} ${units[unit]}`;
}

function span(ms) {
  const s = Math.max(0, Math.round(ms / 1000));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor(s % 3600 / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor(s % 86400 / 3600)} h`;
}

const rate = (value) => value === null ? "–" : value >= 100 ? whole.format(value) : String(Math.round(value * 10) / 10);
const many = (number, noun) => `${whole.format(number)} ${noun}${number === 1 ? "" : "s"}`;
const spoken = (reason) => reason.replaceAll("_", " ");

function make(tag, text, name) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (name) node.className = name;
  return node;
}

function draw(tag, attributes) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

const put = (node, text) => { if (node.textContent !== text) node.textContent = text; };


const link = (name) => `#/stream/${encodeURIComponent(name)}`;
const plural = (number, noun) => number === 1 ? noun : `${noun}s`;

/* The differences of a counter, per second; null where one value is missing, or the counter began again or
   the clock was set back. */
function rates(times, values) {
  return values.map((value, at) => at === 0 || value === null || values[at - 1] === null || value < values[at - 1] || times[at] <= times[at - 1]
    ? null : (value - values[at - 1]) * 1000 / (times[at] - times[at - 1]));
}

class Refused extends Error {
  constructor(status, text) { super(text); this.status = status; }
}

async function ask(path, options = {}) {
  const answer = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(10000), ...options });
  const body = await answer.text();
  let found = null;
  try { found = JSON.parse(body); } catch { /* not one of our documents */ }
  if (!answer.ok || found === null) throw new Refused(answer.status, found && found.error || `${path}: ${answer.status}`);
  return found;
}

const get = (path, query = {}) => {
  const given = Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return ask(given.length ? `${path}?${new URLSearchParams(given)}` : path);
};

const say = (text) => put($("said"), text);
