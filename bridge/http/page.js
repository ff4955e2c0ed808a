"use strict";
const POLL = 2000, HISTORY = 5000, MINUTE = 60000, HOUR = 60 * MINUTE, LINES = 5, EARLIEST = Date.UTC(2025, 0);
const SVG = "http://www.w3.org/2000/svg";
const DASHES = ["", "7 3", "2 3", "10 3 2 3", "5 5", "1 5"];
const KINDS = { dropped: "dropped", rejected: "refused, not acknowledged", refused: "rejected" };
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

/* A table keeps its rows, so that focus and selection survive an update. A cell is a text, or
   {text, sub, pill, state, meter, label, calm}: `pill` is the colour of `state`. */
class Rows {
  constructor(section, columns) {
    this.section = $(section);
    this.body = this.section.querySelector("tbody");
    this.columns = columns;
    this.rows = new Map();
    const head = make("tr");
    head.setAttribute("role", "row");
    for (const [label, kind] of columns) {
      const cell = make("th", label, kind);
      cell.scope = "col";
      cell.setAttribute("role", "columnheader");
      head.append(cell);
    }
    this.section.querySelector("thead").append(head);
  }

  show(items) {
    const kept = new Set();
    items.forEach(([key, cells], place) => {
      kept.add(key);
      let row = this.rows.get(key);
      if (!row) this.rows.set(key, row = this.fresh());
      cells.forEach((cell, at) => this.fill(row.children[at], cell));
      if (this.body.children[place] !== row) this.body.insertBefore(row, this.body.children[place] || null);
    });
    for (const [key, row] of this.rows) if (!kept.has(key)) { row.remove(); this.rows.delete(key); }
    this.section.querySelector("table").hidden = !items.length;
    this.section.querySelector(".empty").hidden = items.length > 0;
  }

  fresh() {
    const row = make("tr");
    row.setAttribute("role", "row");
    for (const [label, kind] of this.columns) {
      const cell = make("td", undefined, kind);
      cell.setAttribute("role", "cell");
      cell.dataset.label = label;
      cell.append(make("span", "", "value"));
      row.append(cell);
    }
    return row;
  }

  fill(cell, content) {
    const { text, sub, pill, state, meter, label, calm } = typeof content === "string" ? { text: content } : content;
    const value = cell.firstChild;
    const wanted = JSON.stringify([text, sub, pill, state, meter, label, calm]);
    if (cell.shown === wanted) return;
    cell.shown = wanted;
    cell.classList.toggle("pills", pill !== undefined);
    value.replaceChildren(pill ? make("span", state, `pill ${pill}`) : document.createTextNode(text));
    if (meter !== undefined) {
      const bar = make("meter");
      Object.assign(bar, { min: 0, max: 1, value: meter }, calm ? {} : { low: 0.8, high: 0.95, optimum: 0 });
      bar.setAttribute("aria-label", label);
      value.append(bar);
    }
    if (sub) value.append(make("span", sub, "sub"));
  }
}

function nice(most) {
  if (most <= 4) return 4;
  const power = 10 ** Math.floor(Math.log10(most));
  return [1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10].map((n) => n * power).find((n) => n >= most);
}

/* Lines over the last hour. `series`: [{name, values, style}], values as long as times, null for a gap. */
class Chart {
  constructor(id, unit, nothing) {
    this.box = $(id);
    this.nothing = nothing;
    this.text = $(`${id}-text`);
    this.unit = unit;
    this.times = [];
    this.series = [];
    this.tip = make("div", "", "tip");
    this.tip.hidden = true;
    this.box.addEventListener("pointermove", (event) => this.point(event.clientX));
    this.box.addEventListener("pointerleave", () => this.point(null));
    new ResizeObserver(() => this.paint()).observe(this.box);
  }

  show(times, series, text) {
    this.times = times;
    this.series = series;
    put(this.text, text);
    this.paint();
  }

  paint() {
    const width = this.box.clientWidth, height = this.box.clientHeight;
    if (!width) return;
    const left = 46, right = width - 6, top = 8, bottom = height - 22;
    const end = this.times.length ? this.times[this.times.length - 1] : Date.now();
    const highest = Math.max(0, ...this.series.flatMap((one) => one.values.filter((v) => v !== null)));
    const most = nice(highest);
    const length = this.times.length ? Math.min(HOUR, Math.max(5 * MINUTE, end - this.times[0])) : HOUR;
    this.x = (time) => right - (end - time) / length * (right - left);
    this.y = (value) => bottom - value / most * (bottom - top);
    const svg = draw("svg", { role: "img", "aria-label": this.text.textContent, viewBox: `0 0 ${width} ${height}` });
    for (const part of highest ? [0, 0.25, 0.5, 0.75, 1] : [0]) {
      const y = this.y(most * part);
      svg.append(draw("line", { class: "grid", x1: left, x2: right, y1: y, y2: y }));
      const text = draw("text", { x: left - 7, y: y + 4, "text-anchor": "end" });
      text.textContent = brief.format(most * part);
      svg.append(text);
    }
    for (const part of width > 420 ? [1, 0.75, 0.5, 0.25, 0] : [1, 0.5, 0]) {
      const time = end - part * length;
      const text = draw("text", { x: this.x(time), y: height - 4,
        "text-anchor": part === 1 ? "start" : part ? "middle" : "end" });
      text.textContent = clock.format(time);
      svg.append(text);
    }
    for (const { values, style } of this.series) {
      let path = "", pen = "M";
      values.forEach((value, at) => {
        if (value === null) { pen = "M"; return; }
        path += `${pen}${this.x(this.times[at]).toFixed(1)} ${this.y(value).toFixed(1)}`;
        pen = "L";
      });
      svg.append(draw("path", { class: `line s${style}`, d: path, "stroke-dasharray": DASHES[style] }));
      if (values.length === 1 && values[0] !== null)
        svg.append(draw("circle", { class: `dot f${style}`, r: 3, cx: this.x(this.times[0]), cy: this.y(values[0]) }));
    }
    if (!highest) {
      const text = draw("text", { class: "nothing", x: (left + right) / 2, y: (top + bottom) / 2, "text-anchor": "middle" });
      text.textContent = this.times.length ? this.nothing : "Loading";
      svg.append(text);
    }
    this.mark = draw("line", { class: "mark", y1: top, y2: bottom, visibility: "hidden" });
    svg.append(this.mark);
    this.box.replaceChildren(svg, this.tip);
  }

  point(clientX) {
    if (clientX === null || !this.times.length) {
      this.tip.hidden = true;
      if (this.mark) this.mark.setAttribute("visibility", "hidden");
      return;
    }
    const at = clientX - this.box.getBoundingClientRect().left;
    let best = 0;
    this.times.forEach((time, n) => {
      if (Math.abs(this.x(time) - at) < Math.abs(this.x(this.times[best]) - at)) best = n;
    });
    const x = this.x(this.times[best]);
    this.mark.setAttribute("x1", x);
    this.mark.setAttribute("x2", x);
    this.mark.setAttribute("visibility", "visible");
    const shown = this.series.map(({ name, values }) => [name, values[best]]).filter(([, value]) => value !== null);
    put(this.tip, [moment.format(this.times[best]),
      ...shown.map(([name, value]) => `${name}: ${rate(value)} ${this.unit}`)].join("\n"));
    this.tip.hidden = false;
    this.tip.style.left = `${Math.min(Math.max(0, x + 10), Math.max(0, this.box.clientWidth - this.tip.offsetWidth))}px`;
  }
}

const streams = new Rows("streams", [["Stream"], ["State"], ["Rate", "n"], ["Messages", "n"], ["Size", "wide"], ["Oldest", "n"], ["Limits", "wide"]]);
const exports_ = new Rows("exports", [["Export"], ["State"], ["Pending", "n"], ["Lag", "n"], ["Exported", "n"], ["Last attempt", "n"]]);
const drops = new Rows("drops", [["Where"], ["What"], ["Count", "n"]]);
const upstreams = new Rows("upstreams", [["Broker"], ["State"], ["Received", "n"], ["Waiting", "n"]]);
const clients = new Rows("clients", [["Client id"], ["User"], ["Address"], ["Protocol"]]);
const backlog = new Chart("backlog", "messages", "No messages are pending");
const speed = new Chart("rate", "per second", "No messages yet");
const tiles = new Map();

function tile(name, value, sub, level = "") {
  if (!tiles.has(name)) {
    const box = make("div");
    box.append(make("dt", name), make("dd"), make("dd"));
    $("tiles").append(box);
    tiles.set(name, box);
  }
  const [, first, second] = tiles.get(name).children;
  put(first, value);
  put(second, sub);
  second.className = level;
}

function showNotices(items) {
  const list = $("notices"), wanted = JSON.stringify(items);
  if (list.shown === wanted) return;
  list.shown = wanted;
  list.replaceChildren(...items.map(([what, why]) => {
    const item = make("li");
    item.append(make("strong", what), make("span", why));
    return item;
  }));
}

function showState(level, text) {
  const state = $("state");
  state.dataset.level = level;
  put(state, text);
}

function show(now) {
  document.title = `${now.gateway} – streambridge`;
  put($("gateway"), now.gateway);
  put($("about"), `MQTT gateway, streambridge ${now.version}, running for ${span(now.time - now.started)}`);
  const notices = [], ready = now.readiness;
  if (now.storageError) notices.push(["Nothing can be stored", now.storageError]);
  if (!now.workerRunning && ready.phase === "running") notices.push(["Exports are interrupted", "the worker process has ended and is being restarted"]);
  if (ready.unreachable) notices.push(["No messages are received", ready.unreachable]);
  for (const [name, why] of Object.entries(ready.refused)) notices.push([`Messages for ${name} are refused`, why]);
  if (now.time < EARLIEST) notices.push(["The clock is wrong", `it shows ${moment.format(now.time)}; messages are stored with that time`]);
  if (now.clockSteps) notices.push(["The clock was set", `${now.clockStep > 0 ? "forward" : "back"} by ${span(Math.abs(now.clockStep))}; no message expires because of that`]);
  const sum = (values) => values.reduce((a, b) => a + b, 0);
  const active = now.exports.filter((e) => !e.disabled && !e.paused);
  const failing = active.filter((e) => e.error).length;
  const stuck = Object.keys(ready.failing).length + Object.keys(ready.refused).length;
  const stopped = active.filter((e) => e.stopped).length;
  showNotices(notices);
  if (now.storageError) showState("bad", "Cannot store");
  else if (ready.phase !== "running") showState("unknown", ready.phase === "stopping" ? "Stopping" : "Starting");
  else if (stuck) showState("bad", `${many(stuck, "stream")} cannot store`);
  else if (!ready.ok) showState("bad", "No messages are received");
  else if (stopped) showState("bad", `Storing; ${many(stopped, "export")} stopped`);
  else if (failing) showState("warn", `Storing; ${many(failing, "export")} retrying`);
  else showState("good", "All is well");

  const lost = sum(now.streams.flatMap((s) => Object.entries(s.dropped)).filter(([why]) => why !== "exported" && why !== "purged").map(([, n]) => n));
  const sessions = sum(Object.values(now.counts).map((c) => c.sessions || 0));
  tile("Devices", whole.format(now.connections), `${many(sessions, "session")} kept`);
  tile("Stored per second", rate(sum(now.streams.map((s) => s.rate || 0))), `${whole.format(sum(now.streams.map((s) => s.newest + 1)))} in total`);
  tile("Pending exports", whole.format(sum(active.map((e) => e.lag))), failing ? `${failing} of ${active.length} exports retrying` : many(active.length, "export"), failing ? "warn" : "");
  tile("Stored", size(sum(now.streams.map((s) => s.size))), many(sum(now.streams.map((s) => s.messages)), "message"));
  tile("Disk free", now.diskSize ? size(now.diskFree) : "–", now.diskSize ? `of ${size(now.diskSize)}` : "");
  tile("Dropped", whole.format(lost), "by limits or damage", lost ? "warn" : "");

  streams.show(now.streams.map((s) => [s.name, [
    { text: s.name, sub: [s.description, s.persistence === "Memory" ? "in memory" : ""].filter(Boolean).join("; ") },
    s.error ? { text: "", pill: "bad", state: "cannot store", sub: s.error }
      : s.name in ready.failing ? { text: "", pill: "bad", state: "full, refuses messages" } : { text: "", pill: "good", state: "ok" },
    { text: s.rate === null ? "–" : `${rate(s.rate)}/s` },
    { text: whole.format(s.messages), sub: s.newest < 0 ? "" : `to number ${whole.format(s.newest)}` },
    { text: `${size(s.size)} of ${size(s.maxSize)}`, meter: Math.min(1, s.size / s.maxSize), calm: s.overwrites,
      label: `${s.name}: ${Math.round(100 * s.size / s.maxSize)} % of max_size` },
    { text: s.oldestTime === null ? "–" : span(now.time - s.oldestTime) },
    { text: s.limits[0], sub: s.limits.slice(1).join(", ") },
  ]]));
  exports_.show(now.exports.map((e) => [JSON.stringify([e.stream, e.identifier]), [
    { text: e.identifier, sub: `${e.stream} to ${e.kind}` },
    e.disabled ? { text: "", pill: "warn", state: "disabled" }
      : e.paused ? { text: "", pill: "warn", state: "paused", sub: e.error || "" }
      : e.stopped ? { text: "", pill: "bad", state: "stopped", sub: e.error }
      : e.error ? { text: "", pill: "warn", state: "retrying", sub: `${trouble(e, now.time)}: ${e.error}` }
      : !e.lag ? { text: "", pill: "good", state: "up to date" }
      : { text: "", pill: "good", state: e.kind === "consumer" ? "waiting for clients" : "exporting" },
    { text: whole.format(e.lag), sub: e.unacknowledgedMessages ? `${whole.format(e.unacknowledgedMessages)} fetched` : "" },
    { text: e.lag === 0 ? "0 s" : e.waitingSince === null ? "–" : span(now.time - e.waitingSince) },
    { text: whole.format(e.exportedMessages), sub: size(e.exportedBytes) },
    { text: e.lastExportTime ? `${span(now.time - e.lastExportTime)} ago` : "never" },
  ]]));
  $("upstreams").hidden = !now.upstreams.length;
  upstreams.show(now.upstreams.map((u) => [u.name, [
    { text: u.name, sub: u.url },
    u.error ? { text: "", pill: "warn", state: u.connected ? "held" : "not connected", sub: u.error }
      : { text: "", pill: "good", state: "connected" },
    whole.format(u.received),
    whole.format(u.waiting),
  ]]));
  const lines = [];
  for (const s of now.streams) {
    for (const [why, n] of Object.entries(s.dropped)) lines.push([`stream ${s.name}`, `dropped: ${spoken(why)}`, n]);
    for (const [why, n] of Object.entries(s.rejected)) lines.push([`stream ${s.name}`, `refused: ${spoken(why)}`, n]);
    for (const [why, n] of Object.entries(s.failures)) lines.push([`stream ${s.name}`, `files: ${spoken(why)}`, n]);
    if (s.deduplicated) lines.push([`stream ${s.name}`, "not stored twice", s.deduplicated]);
  }
  for (const [frontEnd, counts] of Object.entries(now.counts))
    for (const [what, n] of Object.entries(counts)) {
      const [, kind, why] = /^(dropped|rejected|refused)_(.*)$/.exec(what) || [];
      if (kind && n) lines.push([frontEnd, `${KINDS[kind]}: ${spoken(why)}`, n]);
    }
  drops.show(lines.map(([where, what, n]) => [`${where} ${what}`, [where, what, whole.format(n)]]));
  put($("clients-text"), now.clients.length < now.connections && now.clients.length
    ? `${now.clients.length} of ${whole.format(now.connections)} connections are listed.` : "");
  clients.show(now.clients.map((c) => [JSON.stringify([c.listener, c.id, c.address]), [c.id, c.user === null ? "anonymous" : c.user, c.address, c.protocol]]));
}

function trouble(e, time) {
  const parts = [];
  if (e.failedAttempts) parts.push(`${many(e.failedAttempts, "attempt")} failed`);
  if (e.errorSince) parts.push(`since ${span(time - e.errorSince)}`);
  if (e.nextAttempt) parts.push(e.nextAttempt > time ? `next in ${span(e.nextAttempt - time)}` : "next now");
  return parts.join(", ") || "failing";
}

const past = { times: [], rate: [], lags: new Map() };

function remember(more) {
  const before = past.times.length;
  past.times.push(...more.times);
  past.rate.push(...more.rate);
  const fresh = new Map(more.lags.map((one) => [JSON.stringify([one.stream, one.export]), one]));
  for (const [key, one] of fresh)
    if (!past.lags.has(key)) past.lags.set(key, { name: `${one.stream} → ${one.export}`, values: Array(before).fill(null) });
  for (const [key, kept] of past.lags) kept.values.push(...(fresh.has(key) ? fresh.get(key).values : Array(more.times.length).fill(null)));
  const old = past.times.filter((time) => time < past.times[past.times.length - 1] - HOUR).length;
  if (old) {
    past.times.splice(0, old);
    past.rate.splice(0, old);
    for (const one of past.lags.values()) one.values.splice(0, old);
  }
  for (const [key, one] of past.lags) if (one.values.every((value) => value === null)) past.lags.delete(key);
}

function plot() {
  const all = [...past.lags.values()].map((one) => ({ ...one, peak: Math.max(...one.values) }));
  const shown = all.length > LINES + 1 ? [...all].sort((a, b) => b.peak - a.peak).slice(0, LINES) : all;
  const series = shown.map((one, style) => ({ ...one, style }));
  const rest = all.filter((one) => !shown.includes(one));
  if (rest.length)
    series.push({ name: `${rest.length} others`, style: LINES,
      values: past.times.map((_, at) => rest.reduce((sum, one) => sum + (one.values[at] || 0), 0)) });
  const total = past.times.map((_, at) => all.reduce((sum, one) => sum + (one.values[at] || 0), 0));
  const most = Math.max(0, ...total), last = past.times.length - 1;
  backlog.nothing = all.length ? "No messages are pending" : "No stream is exported";
  backlog.show(past.times, series, !most ? "The last hour, in messages."
    : `The last hour, in messages. Now ${whole.format(total[last])}, at most ${whole.format(most)} at ${clock.format(past.times[total.indexOf(most)])}.`);
  const top = Math.max(0, ...past.rate);
  speed.show(past.times, [{ name: "all streams", values: past.rate, style: 0 }],
    `The last hour, all streams together.${top ? ` Now ${rate(past.rate[last])}, at most ${rate(top)}.` : ""}`);
  const legend = $("backlog-legend"), names = series.map((one) => one.name);
  if (JSON.stringify(legend.names) === JSON.stringify(names)) return;
  legend.names = names;
  legend.replaceChildren(...series.map(({ name, style }) => {
    const item = make("li"), sample = draw("svg", { viewBox: "0 0 28 10", "aria-hidden": "true" });
    sample.append(draw("line", { class: `s${style}`, x1: 0, x2: 28, y1: 5, y2: 5, "stroke-dasharray": DASHES[style] }));
    item.append(sample, document.createTextNode(name));
    return item;
  }));
}

async function get(path) {
  const answer = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(10000) });
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

function repeat(work, pause) {
  let failedSince = null;
  const turn = async () => {
    if (!document.hidden) {
      try {
        await work();
        failedSince = null;
      } catch (error) {
        console.warn(error);
        failedSince = failedSince || Date.now();
        showState("bad", `No answer since ${clock.format(failedSince)}`);
      }
    }
    setTimeout(turn, pause);
  };
  turn();
}

repeat(async () => show(await get("/status.json")), POLL);
repeat(async () => {
  remember(await get(`/history.json?since=${past.times.length ? past.times[past.times.length - 1] : 0}`));
  plot();
}, HISTORY);
